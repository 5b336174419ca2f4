"""What a node that hosts workers and not the driver sends to the store."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from orchestrator.driver.nodes.node_uploads import mirror_of
from orchestrator.records.json_file import write_json
from orchestrator.records.lock import this_process
from orchestrator.records.output_dir import OutputDir
from orchestrator.records.run_dir import RunDir

DRIVER = {**this_process(), "boot_id": "of another host"}
DEAD = {**this_process(), "start_ticks": 0}


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    output = OutputDir.of(f"file://{tmp_path}/store", staging_dir=str(tmp_path / "node"))
    return output.staged("2026-01-01/10-00-00-run")


def copied(source: Path, target: Path) -> bool:
    shutil.copyfile(source, target)
    return False


def drive(run_dir: RunDir, driver: dict[str, Any]) -> None:
    """Leave what a driver writes here."""
    run_dir.path.mkdir(parents=True)
    run_dir.update_record(uid="of this run", driver=driver)
    write_json(run_dir.origin_file, driver)
    for file in (run_dir.metrics_file, run_dir.events_file, run_dir.tracking_file, run_dir.config_file):
        file.write_text("of this driver")


@pytest.mark.parametrize("before", [None, DEAD, {**DEAD, "boot_id": "of a boot before"}])
def test_a_node_sends_the_files_of_its_workers_and_no_records(
    before: dict[str, Any] | None, run_dir: RunDir, tmp_path: Path
) -> None:
    """Also if an earlier driver of the run was here, and its records are still there."""
    if before is not None:
        drive(run_dir, before)
    mirror = mirror_of(run_dir, DRIVER, every_s=60, masked=copied)
    (run_dir.logs / "rank-1.log").write_text("of a worker")
    run_dir.samples.mkdir()
    run_dir.sample_file(1, "text", "txt").write_text("of a worker")
    assert mirror.finish(10) == []
    sent = [p for p in (tmp_path / "store").rglob("*") if p.is_file()]
    assert {(p.name, p.read_text()) for p in sent} == {
        ("rank-1.log", "of a worker"),
        ("step-000001-text.txt", "of a worker"),
    }


def test_the_node_of_the_driver_leaves_the_upload_to_it(run_dir: RunDir) -> None:
    drive(run_dir, this_process())
    assert mirror_of(run_dir, this_process(), every_s=60, masked=copied) is None
    assert run_dir.metrics_file.exists()

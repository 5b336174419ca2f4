"""Sweeps on a store, from two hosts with a staging directory each."""

import json
from pathlib import Path

from orchestrator.records.output_dir import OutputDir
from orchestrator.records.sweep_dir import SweepDir, all_sweeps, runs_of


def test_another_host_finds_the_sweeps_on_a_store_and_their_runs(tmp_path: Path) -> None:
    store = tmp_path / "store"
    here, elsewhere = (OutputDir.of(f"file://{store}", staging_dir=str(tmp_path / name)) for name in ("here", "there"))
    for output in (here, elsewhere):
        output.prepare()
    sweep = SweepDir.of(here, "abc")
    sweep.write_record({"id": "abc", "runs": [["seed=0"], ["seed=1"]]})
    sweep.report.write_text("# Sweep")
    sweep.upload(sweep.report)
    assert (store / "sweeps" / "abc" / "report.md").read_text() == "# Sweep"
    assert sweep.location_of(sweep.report) == f"file://{store}/sweeps/abc/report.md"
    for number, name in ((1, "12-30-01-a"), (1, "12-31-01-a"), (2, "12-32-01-b")):
        run = store / "2026-05-01" / name
        run.mkdir(parents=True)
        (run / "run.json").write_text(json.dumps({"sweep": {"id": "abc", "run": str(number)}}))
        (run / "lease").touch()

    (found,) = all_sweeps(elsewhere)
    assert found.read_record()["runs"] == [["seed=0"], ["seed=1"]]
    runs = runs_of(elsewhere, "abc")
    assert {number: run.path.name for number, run in runs.items()} == {1: "12-31-01-a", 2: "12-32-01-b"}
    assert runs_of(elsewhere, "xyz") == {}

"""What the end of a run suggests to type next."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from orchestrator.driver.ending import RunEnding
from orchestrator.driver.process.origin import HERE
from orchestrator.driver.process.run_context import RunResult
from orchestrator.records import run_dir as rundir
from orchestrator.records.json_file import write_json
from orchestrator.records.run_dir import RunDir


def commands(
    run_dir: RunDir, status: Literal["FINISHED", "FAILED"], *, in_sweep: bool = False, steps: int = 0
) -> tuple[str, ...]:
    nothing: Any = None
    tracking: Any = SimpleNamespace(uri="sqlite:///runs.db")
    ending = RunEnding(
        plan=nothing,
        run_dir=run_dir,
        tracking=tracking,
        uploader=nothing,
        records=nothing,
        journal=nothing,
        events=nothing,
        redactor=nothing,
        resume_command="continue it",
        in_sweep=in_sweep,
        owns_process=True,
        origin=HERE,
    )
    result = RunResult(status=status, exit_code=1, reason="", run_dir=run_dir.path, url=None, summary={"steps": steps})
    return ending._next_commands(result, needs_sync=False)


@pytest.mark.parametrize("saved", [False, True])
def test_a_run_is_offered_to_resume_only_if_it_has_a_checkpoint(saved: bool, tmp_path: Path) -> None:
    run_dir = rundir.create(tmp_path, "digits-ddp")
    if saved:
        (run_dir.checkpoints / "step-00000003").mkdir(parents=True)
        (run_dir.checkpoints / "step-00000003" / "manifest.json").write_text("{}")
    assert ("continue it" in commands(run_dir, "FAILED")) == saved


@pytest.mark.needs("sweep")
def test_a_run_that_failed_is_compared_only_with_others_that_finished(tmp_path: Path) -> None:
    compare = f"orchestrator compare --last 5 --output-dir {tmp_path}"
    run_dir = rundir.create(tmp_path, "digits-ddp")
    for number in range(2):
        assert compare not in commands(run_dir, "FAILED", steps=3)
        write_json(rundir.create(tmp_path, f"other-{number}").record_file, {"state": "finished"})
    assert compare in commands(run_dir, "FAILED", steps=3)
    assert compare not in commands(run_dir, "FAILED")


@pytest.mark.needs("tracking")
def test_event_files_of_tensorboard_are_opened_last(tmp_path: Path) -> None:
    run_dir = rundir.create(tmp_path, "digits-ddp")
    (run_dir.sinks / "tensorboard").mkdir(parents=True)
    assert commands(run_dir, "FINISHED")[-1] == f"tensorboard --logdir {tmp_path}"


@pytest.mark.needs("sweep")
@pytest.mark.needs("tracking")
def test_a_run_of_a_sweep_leaves_what_concerns_all_runs_to_the_sweep(tmp_path: Path) -> None:
    run_dir = rundir.create(tmp_path, "digits-ddp")
    assert commands(run_dir, "FINISHED", in_sweep=True) == ()
    assert commands(run_dir, "FINISHED") == (
        f"orchestrator compare --last 5 --output-dir {tmp_path}",
        "mlflow ui --backend-store-uri sqlite:///runs.db",
    )

"""What the user is told of a worker that has failed."""

from pathlib import Path

import pytest

from orchestrator.driver.run.run_recorder import worker_failed, worker_lost
from orchestrator.policy.failure import Outcomes
from orchestrator.policy.run_state import GenerationEnd
from orchestrator.protocol.messages import Failure
from orchestrator.records.run_dir import RunDir


def end_of(*, traceback: str = "", log_tail: str = "") -> GenerationEnd:
    """The end of a generation whose rank 1 failed after step 4, when others had done 6 steps."""
    outcomes = Outcomes(2)
    failure = Failure(message="it failed", traceback=traceback, time=1.0, collateral=False, log_tail=log_tail)
    outcomes.fail(1, failure, step=4)
    return GenerationEnd(outcomes=outcomes, last_step=6)


@pytest.mark.parametrize(
    ("traceback", "last_step", "runs_script", "step"),
    [("Traceback ...", 5, False, 4), ("", 5, False, 5), ("", 0, True, None), ("", 0, False, 0)],
)
def test_a_run_fails_at_the_last_step_that_is_known_of_the_rank(
    tmp_path: Path, traceback: str, last_step: int, runs_script: bool, step: int | None
) -> None:
    """The step of a script that reports none is not known."""
    end, run_dir = end_of(traceback=traceback), RunDir(tmp_path)
    assert worker_failed(end, 1, "rank 1", run_dir, last_step=last_step, runs_script=runs_script).step == step


@pytest.mark.parametrize("runs_script", [False, True])
def test_a_loss_is_told_with_the_last_step_of_any_rank(tmp_path: Path, runs_script: bool) -> None:
    lost = worker_lost(end_of(), 1, "rank 1 on b", RunDir(tmp_path), runs_script=runs_script)
    assert (lost.step, lost.display_name, lost.reason) == (6, "rank 1 on b", "it failed")


@pytest.mark.parametrize(("own", "shown"), [("", "killed"), ("own", "own")])
def test_a_failure_without_lines_of_its_log_has_the_last_ones_of_the_file(tmp_path: Path, own: str, shown: str) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.logs.mkdir()
    run_dir.log_file(1).write_text("killed\n")
    found = worker_failed(end_of(log_tail=own), 1, "rank 1", run_dir, last_step=0, runs_script=False)
    assert found.log_tail.strip() == shown

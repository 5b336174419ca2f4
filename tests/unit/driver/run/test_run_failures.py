"""What the user is told of a worker that has failed."""

from pathlib import Path

import pytest

from orchestrator.driver.run.run_recorder import worker_failed, worker_lost
from orchestrator.policy.failure import Outcomes
from orchestrator.policy.run_state import GenerationEnd
from orchestrator.protocol.messages import Failure
from orchestrator.records.run_dir import RunDir


def end_of(failure: Failure) -> GenerationEnd:
    """The end of a generation whose rank 1 failed after step 4, when others had done 6 steps."""
    outcomes = Outcomes(2)
    outcomes.fail(1, failure, step=4)
    return GenerationEnd(outcomes=outcomes, last_step=6)


def failure(*, traceback: str = "", log_tail: str = "") -> Failure:
    return Failure(message="it failed", traceback=traceback, time=1.0, collateral=False, log_tail=log_tail)


@pytest.mark.parametrize(("traceback", "step"), [("Traceback ...", 4), ("", 5)])
def test_a_run_fails_at_the_last_step_that_is_known_of_the_rank(tmp_path: Path, traceback: str, step: int) -> None:
    end = end_of(failure(traceback=traceback))
    assert worker_failed(end, 1, "rank 1", RunDir(tmp_path), last_step=5, runs_script=False).step == step


def test_the_step_of_a_script_that_reports_none_is_not_known(tmp_path: Path) -> None:
    end = end_of(failure())
    assert worker_failed(end, 1, "rank 1", RunDir(tmp_path), last_step=0, runs_script=True).step is None
    assert worker_failed(end, 1, "rank 1", RunDir(tmp_path), last_step=0, runs_script=False).step == 0


def test_a_loss_is_told_with_the_last_step_of_any_rank(tmp_path: Path) -> None:
    assert worker_lost(end_of(failure()), 1, "rank 1", RunDir(tmp_path), runs_script=True).step == 6
    lost = worker_lost(end_of(failure()), 1, "rank 1 on b", RunDir(tmp_path), runs_script=False)
    assert (lost.step, lost.display_name, lost.reason) == (6, "rank 1 on b", "it failed")


def test_a_failure_without_lines_of_its_log_has_the_last_ones_of_the_file(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    log = run_dir.log_file(1)
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("killed\n")
    assert "killed" in worker_failed(end_of(failure()), 1, "rank 1", run_dir, last_step=0, runs_script=False).log_tail
    assert (
        worker_failed(end_of(failure(log_tail="own")), 1, "rank 1", run_dir, last_step=0, runs_script=False).log_tail
        == "own"
    )

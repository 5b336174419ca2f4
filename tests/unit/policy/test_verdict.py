"""The status, exit code and reason of every end of a run."""

import signal

import pytest

from helpers.files.golden import Golden
from orchestrator.policy.run_state import RESULT_LOST, Verdict, completed, refused, stopped
from orchestrator.verb_options import BAD_INPUT


def test_a_run_whose_last_checkpoint_is_missing_has_not_finished(golden: Golden) -> None:
    assert completed(10, checkpoint_missing=None) == Verdict("FINISHED", 0)
    lost = completed(10, checkpoint_missing="could not be written: the disk is full")
    assert (lost.status, lost.exit_code) == ("FAILED", RESULT_LOST)
    golden.says(lost.reason)


def test_a_run_that_has_not_begun_is_refused_like_wrong_arguments() -> None:
    assert refused("too small") == Verdict("FAILED", BAD_INPUT, "too small")


@pytest.mark.parametrize(
    ("at_step", "trained", "missing", "when"),
    [
        (7, True, None, "at step 7"),
        (7, True, "was not confirmed: no file", "at step 7; its checkpoint was not confirmed: no file"),
        (None, True, None, "without a last checkpoint"),
        (None, False, None, "before training began"),
    ],
)
def test_a_stopped_run_says_what_is_saved(at_step: int | None, trained: bool, missing: str | None, when: str) -> None:
    verdict = stopped(signal.SIGTERM, "SIGTERM", at_step=at_step, trained=trained, checkpoint_missing=missing)
    assert verdict == Verdict("KILLED", 143, f"stopped by SIGTERM {when}")

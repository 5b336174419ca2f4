"""The status, exit code and reason of every end of a run."""

import signal

import pytest

from helpers.files.golden import Golden
from orchestrator.policy.failure import Outcomes
from orchestrator.policy.run_state import RESULT_LOST, GenerationEnd, Verdict, completed, refused, stopped
from orchestrator.protocol.messages import Phase
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


@pytest.mark.parametrize(
    ("phases", "text"),
    [
        ({1: "eval"}, "rank 1 did not end within cluster.stop_grace_s, in a batch of an evaluation"),
        ({0: "train", 1: "train"}, "rank 0, rank 1 did not end within cluster.stop_grace_s, in a training step"),
        ({0: None}, "rank 0 did not end within cluster.stop_grace_s, starting"),
    ],
)
def test_a_stop_without_a_checkpoint_names_who_held_it_up(phases: dict[int, Phase | None], text: str) -> None:
    end = GenerationEnd(outcomes=Outcomes(2), last_step=7, phases=phases)
    assert end.held_up_by == text
    verdict = stopped(signal.SIGTERM, "SIGTERM", at_step=None, trained=True, held_up_by=end.held_up_by)
    assert verdict.reason == f"stopped by SIGTERM without a last checkpoint: {text}"


def test_a_stopped_script_says_what_it_could_not_save() -> None:
    verdict = stopped(
        signal.SIGTERM, "SIGTERM", at_step=3, trained=True, runs_script=True, unsaved={1: "OSError: full"}
    )
    assert verdict.reason == "stopped by SIGTERM at step 3; what rank 1 was to save may be missing: OSError: full"


def test_a_stopped_script_says_that_the_run_has_saved_nothing_of_it() -> None:
    verdict = stopped(signal.SIGINT, "SIGINT", at_step=0, trained=True, runs_script=True)
    assert verdict.reason == "stopped by SIGINT while its script ran; only what the script itself has saved is kept"

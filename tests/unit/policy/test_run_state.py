"""What follows a generation, over the table of everything that can happen in one. Decided without Ray."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from helpers.conformance.cases import RECOVERY
from orchestrator.policy.failure import Outcomes
from orchestrator.policy.recovery import Failed, FailureRecord, RecoveryPlan
from orchestrator.policy.run_state import Continuing, GenerationEnd, NextState, what_follows
from orchestrator.protocol.events import EndReason
from orchestrator.protocol.messages import ANY_RANK, Failure, Outcome

STEP, GRACE_S = 40, 10.0
HELD = {ANY_RANK: (STEP,)}
DEATH = Failure(message="died", traceback="", time=1.0, collateral=False, log_tail="")
BROKEN = replace(DEATH, message="connection closed", time=0.5, collateral=True)
DONE = Outcome(status="done", step=STEP, recoverable_steps=HELD)
STOPPED = Outcome(status="stopped", step=STEP, recoverable_steps=HELD)
LOSES_TOUCH = Outcome(status="failed", step=STEP, failure=BROKEN, recoverable_steps=HELD)
DIED = "died"

SURVIVOR = RecoveryPlan(lost=(0,), sources=(1, 1), step=STEP, pause_s=0)
CHECKPOINT = RecoveryPlan(lost=(0, 1), sources=None, step=0, pause_s=0)
IN_PLACE = RecoveryPlan(lost=(), sources=(0, 1), step=STEP, pause_s=0)
NO_STOP, JUST_NOW, LONG_AGO = None, 1.0, GRACE_S


def after(
    *ranks: Outcome | str | None,
    asked: EndReason | None,
    draining: tuple[int, ...] = (),
    stopped_ago_s: float | None = NO_STOP,
    max_failures: int = 10,
    earlier: Sequence[FailureRecord] = (),
) -> NextState:
    """The state after a generation; each of ``ranks`` returned an outcome, died, or has not ended (None)."""
    outcomes = Outcomes(world_size=len(ranks))
    for rank, outcome in enumerate(ranks):
        if isinstance(outcome, Outcome):
            outcomes.add(rank, outcome)
        elif outcome == DIED:
            outcomes.fail(rank, DEATH, step=STEP)
    end = GenerationEnd(outcomes=outcomes, last_step=STEP, asked=asked, draining=draining, stopped_ago_s=stopped_ago_s)
    config = replace(RECOVERY, max_failures=max_failures)
    return what_follows(end, earlier, recovery=config, stop_grace_s=GRACE_S)


REASONS: list[EndReason | None] = [None, "preempted", "growing", "yielded", "stopped"]


@pytest.mark.parametrize("asked", REASONS)
@pytest.mark.parametrize("stopped_ago_s", [NO_STOP, JUST_NOW, LONG_AGO])
def test_a_run_whose_ranks_have_done_all_steps_is_done_whatever_was_asked(
    asked: EndReason | None, stopped_ago_s: float | None
) -> None:
    assert after(DONE, DONE, asked=asked, stopped_ago_s=stopped_ago_s) == "done"


@pytest.mark.parametrize(
    ("asked", "stopped_ago_s", "expected"),
    [
        ("preempted", NO_STOP, Continuing("replacing", replace(SURVIVOR, lost=(0,)))),
        ("growing", NO_STOP, Continuing("growing", IN_PLACE)),
        ("yielded", NO_STOP, "yielding"),
        ("stopped", JUST_NOW, "stopped"),
        ("preempted", JUST_NOW, "stopped"),
        ("yielded", JUST_NOW, "stopped"),
        # This pause may have saved nothing; the next generation is stopped at once, and saves.
        ("growing", JUST_NOW, Continuing("growing", IN_PLACE)),
    ],
)
def test_a_pause_leads_to_what_was_asked_unless_the_run_is_to_stop(
    asked: EndReason, stopped_ago_s: float | None, expected: NextState
) -> None:
    assert after(STOPPED, STOPPED, asked=asked, draining=(0,), stopped_ago_s=stopped_ago_s) == expected


@pytest.mark.parametrize("asked", REASONS)
def test_ranks_that_have_not_ended_within_the_grace_period_end_the_run(asked: EndReason | None) -> None:
    assert after(STOPPED, None, asked=asked, stopped_ago_s=LONG_AGO) == "stopped"
    assert after(STOPPED, DONE, asked=asked, stopped_ago_s=LONG_AGO) == "stopped"


@pytest.mark.parametrize("asked", REASONS)
@pytest.mark.parametrize("other", [LOSES_TOUCH, STOPPED, DONE], ids=["loses touch", "stopped", "done"])
def test_the_first_failure_is_recovered_from_whatever_was_asked(asked: EndReason | None, other: Outcome) -> None:
    assert after(DIED, other, asked=asked) == Continuing("recovering", SURVIVOR)
    assert after(DIED, DIED, asked=asked) == Continuing("recovering", CHECKPOINT)


@pytest.mark.parametrize(
    ("ranks", "stopped_ago_s", "expected"),
    [
        ((DIED, LOSES_TOUCH), JUST_NOW, Continuing("recovering", SURVIVOR)),  # the survivors can save what they hold
        ((DIED, LOSES_TOUCH), LONG_AGO, "stopped"),
        ((DIED, DIED), JUST_NOW, "stopped"),
    ],
)
@pytest.mark.parametrize("asked", REASONS)
def test_after_a_stop_a_run_recovers_only_to_save_and_in_time(
    ranks: tuple[Outcome | str, ...], stopped_ago_s: float, expected: NextState, asked: EndReason | None
) -> None:
    assert after(*ranks, asked=asked, stopped_ago_s=stopped_ago_s) == expected


@pytest.mark.parametrize("asked", REASONS)
def test_a_run_that_may_not_recover_fails_unless_its_ranks_were_asked_to_stop(asked: EndReason | None) -> None:
    expected = "stopped" if asked == "stopped" else Failed(0, "")
    for stopped_ago_s in (NO_STOP, JUST_NOW):
        assert after(DIED, LOSES_TOUCH, asked=asked, stopped_ago_s=stopped_ago_s, max_failures=0) == expected


def test_earlier_failures_count() -> None:
    same = FailureRecord(rank=1, step=STEP, message="died", raised=False, final=False)
    why = "3 failures in a row without progress"
    assert after(DIED, LOSES_TOUCH, asked=None, earlier=(same, same)) == Failed(0, why)


def test_a_rank_that_all_others_have_lost_touch_with_is_the_failure() -> None:
    """It answers and does not end; the driver records it as failed before it asks what follows."""
    outcomes = Outcomes(world_size=3)
    outcomes.add(0, LOSES_TOUCH)
    assert outcomes.least_advanced({0: 40, 1: 40, 2: 39}) == 2
    assert outcomes.least_advanced({}) == 1
    outcomes.fail(1, DEATH, step=STEP)
    assert outcomes.least_advanced({}) is None, "one has died, which explains the others"
    finished = Outcomes(world_size=1)
    finished.add(0, LOSES_TOUCH)
    assert finished.least_advanced({}) is None

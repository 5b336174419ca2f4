"""The cost of transitions, counted."""

from dataclasses import replace

import pytest

from orchestrator.policy.recovery import RecoveryPlan, Transition, TransitionLog

IN_PLACE = RecoveryPlan(lost=(1,), sources=(0, 0), step=40, pause_s=0)
LOSS = Transition(began=100.0, reached=40, num_workers_before=2, planned=None)


def test_a_failure_costs_until_the_first_step_after_it() -> None:
    log = TransitionLog()
    log.begin(replace(LOSS, reached=47))
    log.continue_with(IN_PLACE, step=40, num_workers=2)
    recovered = log.end(2, 100.5)
    assert (recovered.seconds, recovered.steps_lost, recovered.replaced, recovered.in_place) == (0.5, 7, (1,), True)
    assert log.summary() == {"restarts": 1, "steps_lost": 7, "recovery_s": [0.5], "recovery_s_max": 0.5}
    assert log.effective_time_pct(10.0, step_s=0.1, now=110.0) == pytest.approx(100 * (1 - (0.5 + 0.7) / 10))


def test_a_failure_while_it_recovers_belongs_to_the_same_recovery() -> None:
    log = TransitionLog()
    log.begin(replace(LOSS, reached=47))
    log.continue_with(IN_PLACE, step=40, num_workers=1)
    log.begin(replace(LOSS, began=103.0, reached=0, num_workers_before=1))
    log.continue_with(IN_PLACE, step=30, num_workers=1)
    recovered = log.end(3, 104.0)
    assert (recovered.seconds, recovered.steps_lost) == (4.0, 17)
    assert (recovered.num_workers_before, recovered.num_workers) == (2, 1)
    assert log.summary()["restarts"] == 1


def test_what_was_planned_is_no_failure_but_takes_time() -> None:
    log = TransitionLog()
    for why in ("preempted", "growing"):
        log.begin(replace(LOSS, planned=why))
        log.continue_with(IN_PLACE, step=40, num_workers=2)
        log.end(2, 101.0)
    assert log.summary() == {"restarts": 0, "steps_lost": 0, "recovery_s": [], "preemptions": 1}
    assert log.effective_time_pct(10.0, step_s=0.1, now=110.0) == 80


@pytest.mark.parametrize("found_workers", [True, False])
def test_a_wait_in_vain_takes_time_but_is_no_recovery(found_workers: bool) -> None:
    log = TransitionLog()
    log.begin(LOSS)
    if found_workers:
        log.continue_with(IN_PLACE, step=40, num_workers=2)
    assert log.effective_time_pct(40.0, step_s=0.1, now=130.0) == 25
    assert log.summary()["restarts"] == 0


def test_a_clock_that_is_set_back_makes_no_time_negative() -> None:
    log = TransitionLog()
    log.begin(LOSS)
    log.continue_with(IN_PLACE, step=40, num_workers=2)
    assert log.effective_time_pct(40.0, step_s=0.1, now=50.0) == 100
    recovered = log.end(2, 50.0)
    assert recovered.seconds == 0


def test_a_start_is_no_recovery() -> None:
    assert TransitionLog().end(1, 5.0) is None

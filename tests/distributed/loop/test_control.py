"""What the training thread and the control thread share, with real threads."""

import itertools
import random
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from orchestrator.config.redact import Redactor
from orchestrator.protocol.events import Warned
from orchestrator.protocol.messages import EvalPoint, Reached, TrainPoint
from orchestrator.worker.control.control import AbandonedError, Outbox, PeersMissingError, StepGate


def train_point(step: int, *, step_ms: tuple[float, ...] = (), comm_share: float | None = None) -> TrainPoint:
    return TrainPoint(
        step=step,
        time=0.0,
        loss_sum=0.0,
        weight=1.0,
        step_ms=step_ms,
        data_wait_ms=0.0,
        comm_share=comm_share,
    )


def train_until_told(gate: StepGate, barrier: threading.Barrier, jitter: random.Random, steps: int) -> int:
    """Synchronous steps: no rank ends one before all have begun it. Returns the last one."""
    for step in range(1, steps + 1):
        time.sleep(jitter.random() * 2e-4)
        if not gate.begin(step, 1):
            return step - 1
        barrier.wait(timeout=60)
    return steps


@pytest.mark.parametrize("seed", range(60))
def test_all_ranks_stop_after_the_same_step(seed):
    chance = random.Random(seed)
    ranks, steps = chance.choice([2, 3, 4]), chance.choice([1, 5, 1000])
    gates = [StepGate(timeout_s=60) for _ in range(ranks)]
    barrier = threading.Barrier(ranks)
    with ThreadPoolExecutor(ranks) as pool:
        ends = [
            pool.submit(train_until_told, g, barrier, random.Random(f"{seed} {i}"), steps) for i, g in enumerate(gates)
        ]
        time.sleep(chance.random() * 4e-3)
        begun = []
        for gate in chance.sample(gates, ranks):
            begun.append(gate.hold(1))
            time.sleep(chance.random() * 5e-4)
        assert max(begun).step - min(begun).step <= 2 * ranks
        for gate in chance.sample(gates, ranks):
            gate.finish_step(1, max(begun), save=True)
            time.sleep(chance.random() * 5e-4)
        assert [e.result(timeout=60) for e in ends] == [max(begun).step] * ranks


def test_nothing_begins_while_held():
    gate = StepGate(timeout_s=60)
    assert gate.begin(1, 1)
    assert gate.hold(1) == Reached(1)
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(gate.begin, 2, 1)
        time.sleep(0.1)
        assert not second.done()
        assert gate.hold(1) == Reached(1)
        gate.finish_step(1, 2, save=True)
        assert second.result(timeout=60)
    assert not gate.begin(3, 1)


def test_a_silent_driver_is_not_the_fault_of_the_rank():
    gate = StepGate(timeout_s=0.2)
    gate.hold(1)
    with pytest.raises(ConnectionError, match="held at step 7"):
        gate.begin(7, 1)


@pytest.fixture
def restless_threads() -> Iterator[None]:
    """Threads take turns as often as they can."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


@pytest.mark.usefixtures("restless_threads")
def test_nothing_is_lost_or_doubled_between_two_threads():
    outbox, least = Outbox(Redactor()), 20_000
    beats = 0

    def produce() -> int:
        for step in itertools.count():
            if step >= least and beats > 5:  # the two threads have met
                return step
            outbox.enter(step, "train")
            outbox.put_point(train_point(step))
            if step % 3 == 0:
                outbox.put_event(Warned(message=str(step)))

    points, events = [], []
    with ThreadPoolExecutor(1) as pool:
        producing = pool.submit(produce)
        while not producing.done():
            beat = outbox.collect({})
            points += beat.points
            events += beat.events
            beats += 1
        count = producing.result()
    beat = outbox.collect({"cpu": 1.0})
    points += beat.points
    events += beat.events
    assert [p.step for p in points] == list(range(count))
    assert [e.message for e in events] == [str(s) for s in range(0, count, 3)]
    assert (beat.step, beat.phase, beat.system) == (count - 1, "train", {"cpu": 1.0})
    assert outbox.collect({}).points == ()


def test_busy_time_is_that_without_waiting_for_others():
    outbox = Outbox(Redactor())
    outbox.put_point(train_point(1))
    assert outbox.collect({}).busy_ms is None
    outbox.put_point(train_point(2, step_ms=(10.0, 14.0), comm_share=0.25))
    outbox.put_point(EvalPoint(step=2, time=0.0, loss_sum=0.0, weight=1.0, sums={}))
    assert outbox.collect({}).busy_ms == 9.0


def test_the_next_generation_begins_with_an_open_gate():
    gate = StepGate(timeout_s=60)
    gate.hold(1)
    gate.finish_step(1, 2, save=False)
    assert gate.begin(2, 1)
    assert not gate.begin(3, 1)
    assert not gate.saves
    assert gate.begin(3, 2)
    gate.hold(2)
    assert gate.saves


def test_a_step_of_an_earlier_generation_is_not_one_that_has_begun():
    gate = StepGate(timeout_s=60)
    assert gate.begin(80, 1)
    assert gate.hold(2) == Reached()
    gate.finish_step(2, 0, save=True)
    assert not gate.begin(51, 2), "its checkpoint has step 50"


def test_a_gate_opens_if_other_ranks_cannot_be_held():
    gate = StepGate(timeout_s=60)
    gate.hold(1)
    gate.open(1)
    assert gate.begin(1, 1)
    assert gate.hold(1) == Reached(1)
    gate.finish_step(1, 1, save=True)
    assert not gate.begin(2, 1)


def test_a_late_request_for_an_earlier_generation_changes_nothing():
    gate = StepGate(timeout_s=0.2)
    assert gate.begin(7, 2)
    gate.hold(2)
    assert gate.hold(1) == Reached()
    gate.finish_step(1, 9, save=False)
    gate.open(1)
    with pytest.raises(PeersMissingError):
        gate.begin(8, 2)


def test_who_is_held_hears_that_the_generation_has_ended():
    gate = StepGate(timeout_s=60)
    gate.hold(4)
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(gate.begin, 1, 4)
        gate.abandon(4)
        with pytest.raises(AbandonedError):
            held.result(timeout=60)

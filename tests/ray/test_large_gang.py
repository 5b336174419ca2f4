"""Large gangs: the real driver with simulated workers, from the benchmark of its scale."""

import importlib
import math
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
import ray.cloudpickle as cloudpickle

from helpers.records.runs import wait_for
from orchestrator.driver.gang import members
from orchestrator.driver.gang.members import HEARTBEAT_ATTEMPTS
from orchestrator.driver.gang.spares import START_ATTEMPTS
from orchestrator.policy.run_state import RESULT_LOST
from orchestrator.protocol.events import Event, FirstStepDone, Warned, WorkerLost
from orchestrator.protocol.messages import Heartbeat

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def simulation(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    module = importlib.import_module("harness.simulated_gang")
    cloudpickle.register_pickle_by_value(module)  # the workers of this Ray do not have the folder on their path
    with module.simulated_gangs():
        yield module
    cloudpickle.unregister_pickle_by_value(module)


@contextmanager
def training(simulation: Any, num_ranks: int, folder: Path, *words: str) -> Iterator[Any]:
    """A run that trains: its watcher. The run ends with the block."""
    run, watcher = simulation.prepared_run(num_ranks, folder, *words)
    thread = threading.Thread(target=run.execute)
    thread.start()
    try:
        assert watcher.first_step.wait(60)
        yield watcher
    finally:
        ray.get([host.finish_all.remote() for host in simulation.SimulatedSlots.hosts])
        thread.join(60)
    assert not thread.is_alive()


def messages(watcher: Any, kind: type[Event], field: str) -> list[str]:
    return [getattr(event, field) for event in watcher.events if isinstance(event, kind)]


def healed(watcher: Any) -> Any:
    """The next recovery."""
    assert watcher.healed.wait(60)
    watcher.healed.clear()
    return watcher.recovered[-1]


def test_all_survivors_of_a_large_gang_are_kept_and_one_pause_is_enough_for_those_that_leave(
    simulation: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that leave together are in different thirds of the gang, each of which is asked in another round."""
    monkeypatch.setattr(members, "HEARTBEATS_PER_ROUND", 16)
    with training(simulation, 48, tmp_path) as watcher:
        workers = dict(simulation.SimulatedSlots.workers)
        for slot in (1, 5):
            workers[slot].die()
        recovered = healed(watcher)
        assert recovered.in_place
        assert set(recovered.replaced) == {1, 5}
        anew = {slot for slot, worker in simulation.SimulatedSlots.workers.items() if worker is not workers[slot]}
        assert anew == {1, 5}
        simulation.change([3, 18, 38], leaving=True)
        recovered = healed(watcher)
        assert (recovered.planned, set(recovered.replaced)) == ("preempted", {3, 18, 38})


@pytest.mark.campaign
def test_ranks_train_on_if_one_cannot_be_held_and_those_that_fail_to_answer_are_replaced(
    simulation: Any, tmp_path: Path
) -> None:
    with training(simulation, 16, tmp_path, "cluster.stop_grace_s=1") as watcher:
        simulation.change([7], deaf=True)
        simulation.change([3], leaving=True)
        wait_for(lambda: any("did not answer" in m for m in messages(watcher, Warned, "message")), "a warning")
        hosts = simulation.SimulatedSlots.hosts
        wait_for(lambda: sum(ray.get([host.num_held.remote() for host in hosts])) == 0, "open gates")
        simulation.change([7], deaf=False)
        recovered = healed(watcher)
        assert (recovered.planned, recovered.replaced) == ("preempted", (3,))
        assert messages(watcher, WorkerLost, "reason") == []

        simulation.change([9], num_failing=math.inf)
        assert healed(watcher).replaced == (9,)
        (reason,) = messages(watcher, WorkerLost, "reason")
        assert "lives, but a call to it failed: RuntimeError: no heartbeat" in reason

        simulation.change([0], has_port=False)
        simulation.SimulatedSlots.workers[5].die()
        assert healed(watcher).replaced == (0,), "the last one that was lost"
        assert [event.rank for event in watcher.events if isinstance(event, WorkerLost)][1:] == [5, 0]
        assert "a call to it failed: OSError: no port is free" in messages(watcher, WorkerLost, "reason")[-1]


@pytest.mark.campaign
def test_a_stop_in_a_pause_after_the_last_step_does_not_make_the_run_incomplete(
    simulation: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, watcher = simulation.prepared_run(4, tmp_path)

    def emit(event: Event) -> None:
        if isinstance(event, Warned) and "must leave" in event.message:
            run._stop.received = signal.SIGTERM
        if isinstance(event, FirstStepDone):
            watcher.first_step.set()

    monkeypatch.setattr(watcher, "emit", emit)
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(run.execute)
        assert watcher.first_step.wait(60)
        ray.get([host.finish_all.remote(at_once=False) for host in simulation.SimulatedSlots.hosts])
        simulation.change([1], leaving=True)
        ended = result.result(60)
    assert "all 1000000 steps are done" in ended.reason
    assert ended.exit_code == RESULT_LOST, "simulated workers save nothing"


def test_a_heartbeat_may_fail_now_and_then(simulation: Any, tmp_path: Path) -> None:
    """A process without memory cannot unpack the call for one, and ends its step with an explanation."""
    run, _ = simulation.prepared_run(2, tmp_path)
    with run._workers.gang as gang:
        gang.acquire(run.spec.sizes)
        for num_failing in (HEARTBEAT_ATTEMPTS - 1, HEARTBEAT_ATTEMPTS - 1, HEARTBEAT_ATTEMPTS):
            simulation.change([1], num_failing=num_failing)
            for _ in range(num_failing):
                assert gang.failed_heartbeats == {}
                assert gang.heartbeats(with_system_metrics=False, wait_s=10.0).keys() == {0}
            failed = gang.failed_heartbeats
            assert gang.heartbeats(with_system_metrics=False, wait_s=10.0).keys() == {0, 1}
        assert failed.keys() == {1}


@pytest.mark.campaign
def test_workers_that_die_as_they_start_are_not_started_for_ever(simulation: Any, tmp_path: Path) -> None:
    run, watcher = simulation.prepared_run(2, tmp_path)
    with run._workers.gang as gang:
        gang.acquire(run.spec.sizes)
        slots = simulation.SimulatedSlots
        ray.get([host.limit_workers.remote(2) for host in slots.hosts])

        def no_more_are_started() -> bool:
            gang.refill(4)
            return not gang._spares._starting

        wait_for(no_more_are_started)
        assert len(slots.workers) == 4, "two slots beyond those of the members"
        assert slots.num_started == 2 + 2 * START_ATTEMPTS
        (warning,) = messages(watcher, Warned, "message")
        assert "died while they started (RuntimeError: no start)" in warning


def test_the_heartbeat_of_an_outcome_follows_the_pending_one(simulation: Any, tmp_path: Path) -> None:
    run, _ = simulation.prepared_run(2, tmp_path)
    with run._workers.gang as gang:
        gang.acquire(run.spec.sizes)
        outcome = Heartbeat(step=7, phase="end", first_report=4, events=(Warned(message="the last"),))
        gang._pending_heartbeats[gang.members[0].actor.heartbeat.remote(False)] = 0  # no answer has been taken yet
        gang.add_last_heartbeat(0, outcome)
        gang.add_last_heartbeat(1, outcome)
        early = gang.heartbeats(with_system_metrics=False, wait_s=0.0, ranks=())
        assert early[1] == outcome
        if 0 in gang.unanswered():
            assert 0 not in early
            early = gang.heartbeats(with_system_metrics=False, wait_s=10.0, ranks=(0,))
        assert (early[0].step, early[0].first_report, early[0].events) == (7, 0, outcome.events)
        assert gang.heartbeats(with_system_metrics=False, wait_s=0.0, ranks=()) == {}

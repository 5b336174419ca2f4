"""Large gangs: the real driver with simulated workers, from the benchmark of its scale."""

from __future__ import annotations

import importlib
import threading
from pathlib import Path
from typing import Any

import pytest
import ray
import ray.cloudpickle as cloudpickle

from orchestrator.protocol.events import Warned
from orchestrator.protocol.messages import Heartbeat

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def simulation(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    module = importlib.import_module("simulated_gang")
    cloudpickle.register_pickle_by_value(module)  # the workers of this Ray do not have the folder on their path
    with module.simulated_gangs():
        yield module
    cloudpickle.unregister_pickle_by_value(module)


def test_all_survivors_of_a_large_gang_are_kept(simulation: Any, tmp_path: Path) -> None:
    run, watcher = simulation.prepared_run(192, tmp_path)
    thread = threading.Thread(target=run.execute)
    thread.start()
    try:
        assert watcher.first_step.wait(60)
        workers = dict(simulation.SimulatedSlots.workers)
        for slot in (1, 5):
            workers[slot].die()
        assert watcher.healed.wait(60)
        (recovered,) = watcher.recovered
        assert recovered.in_place
        assert set(recovered.replaced) == {1, 5}
        anew = {slot for slot, worker in simulation.SimulatedSlots.workers.items() if worker is not workers[slot]}
        assert anew == {1, 5}
    finally:
        ray.get([host.finish_all.remote() for host in simulation.SimulatedSlots.hosts])
        thread.join(60)
    assert not thread.is_alive()


def test_the_heartbeat_of_an_outcome_follows_the_pending_one(simulation: Any, tmp_path: Path) -> None:
    run, _ = simulation.prepared_run(2, tmp_path)
    with run._gang as gang:
        gang.acquire()
        outcome = Heartbeat(step=7, phase="end", first_report=4, events=(Warned(message="the last"),))
        gang.heartbeats(with_system_metrics=False, wait_s=0.0, ranks=(0,))
        gang.add_last_heartbeat(0, outcome)
        gang.add_last_heartbeat(1, outcome)
        early = gang.heartbeats(with_system_metrics=False, wait_s=0.0, ranks=())
        assert early[1] == outcome
        if 0 in gang.unanswered():
            assert 0 not in early
            early = gang.heartbeats(with_system_metrics=False, wait_s=10.0, ranks=(0,))
        assert (early[0].step, early[0].first_report, early[0].events) == (7, 0, outcome.events)
        assert gang.heartbeats(with_system_metrics=False, wait_s=0.0, ranks=()) == {}

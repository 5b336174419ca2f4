"""The loop of a rank whose run is stopped at a place after a step, as the driver stops it."""

import threading
import time
from pathlib import Path

from helpers.conformance.cases import Case, assignment
from helpers.conformance.training import default_store, made, make, model_of
from helpers.ranks.gang import own_device
from helpers.ranks.loops import Ran, loop_of, ran
from orchestrator.config.redact import Redactor
from orchestrator.protocol.messages import Reached
from orchestrator.worker.control.control import Outbox, StepGate

TIMEOUT_S = 60


class StoppedGate(StepGate):
    """Stays at a place, once it has begun, until the driver holds the rank."""

    def __init__(self, place: Reached):
        super().__init__(timeout_s=TIMEOUT_S)
        self.place = place
        self.is_there, self.is_held = threading.Event(), threading.Event()

    def _begin(self, place: Reached, generation: int) -> bool:
        begins = super()._begin(place, generation)
        if begins and place == self.place:
            self.is_there.set()
            assert self.is_held.wait(TIMEOUT_S)
        return begins


def _stop(gate: StoppedGate, rank: int, world_size: int, prefix: str) -> None:
    """Do what the driver does for all ranks, on each of them: hold, and let them come to the most advanced place."""
    assert gate.is_there.wait(TIMEOUT_S)
    begun = gate.hold(1)
    if (store := default_store()) is not None:
        store.set(f"{prefix}-{rank}", f"{begun.step} {begun.section} {begun.batch}")
        keys, deadline = [f"{prefix}-{r}" for r in range(world_size)], time.monotonic() + TIMEOUT_S
        while not store.check(keys) and time.monotonic() < deadline:
            time.sleep(0.005)
        begun = max(Reached(*map(int, store.get(key).split())) for key in keys)
    gate.is_held.set()
    gate.finish_step(1, begun, save=True)


def run_cut_off(rank: int, case: Case, world_size: int, run_dir: str, place: Reached) -> Ran:
    """As :func:`run_loop`, with a stop at ``place``."""
    Path(run_dir, "checkpoints").mkdir(parents=True, exist_ok=True)
    orders = assignment(rank=rank, world_size=world_size, generation=1, store_port=0, run_dir=run_dir, case=case)
    strategy, outbox, gate = make(case, rank), Outbox(Redactor()), StoppedGate(place)
    loop = loop_of(orders, case, strategy, outbox=outbox, gate=gate, device=own_device())
    driver = threading.Thread(target=_stop, args=(gate, rank, world_size, f"{run_dir} {place}"), daemon=True)
    driver.start()
    try:
        outcome = loop.run({}, store=default_store())
        driver.join(TIMEOUT_S)
    finally:
        made.clear()
        strategy.close()
        loop.finish(timeout_s=TIMEOUT_S)
    return ran(outcome, outbox, training=model_of(strategy).training, owns_reducer=False)

"""Whether ranks survive the loss of another one, with their weights, and go on in a new group."""

from __future__ import annotations

import multiprocessing
import time
from typing import TypeVar

from gpu_probes.probe import ProbeError
from gpu_probes.rank import (
    HOST,
    RENDEZVOUS_TIMEOUT_S,
    Abandon,
    Abort,
    Aborted,
    Ended,
    Joined,
    Marked,
    Ready,
    Record,
    Recorded,
    Train,
    serve,
)
from orchestrator.worker.control.rendezvous import open_store

WORLD_SIZE = 2
START_TIMEOUT_S = 90.0
FREED_TIMEOUT_S = 30.0
TRAINED_S = 1.0
"""How long ranks train until one is killed."""
LAST_STEPS = 30
"""Made without a fault in the end."""
ENDLESS = 10**6
FAILS_AT = 3
DEVICE_ERRORS = {True: "out of bounds", False: "device-side assert"}
"""What the error says, by whether it is on a CPU."""

T = TypeVar("T")


class RankProcess:
    """A rank in a process of its own, and the answers that nobody has asked for yet."""

    def __init__(self, on_cpu: bool):
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, on_cpu), daemon=True)
        self._process.start()
        theirs.close()
        self._answers: list[object] = []

    def tell(self, order: object) -> None:
        """Send an order."""
        self._connection.send(order)

    def answer(self, kind: type[T], timeout_s: float) -> T:
        """Return the next answer of a kind.

        Raises:
            ProbeError: it did not come in time, or the process has ended.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            for found in self._answers:
                if isinstance(found, kind):
                    self._answers.remove(found)
                    return found
            try:
                if not self._connection.poll(max(0.0, deadline - time.monotonic())):
                    raise ProbeError(f"{kind.__name__} did not come within {timeout_s:.0f} s")
                self._answers.append(self._connection.recv())
            except (EOFError, ConnectionError) as e:
                self._process.join(5)
                code = self._process.exitcode
                raise ProbeError(f"a rank exited with {code} before {kind.__name__}") from e

    def kill(self) -> None:
        """End the process at once."""
        self._process.kill()
        self._process.join(10)


def recoveries(*, communicators: int, kills: int, on_cpu: bool, fails: bool = False) -> str:
    """Kill the last rank in a step, ``kills`` times, and train on after each.

    Args:
        communicators: how many each step uses, one after the other.
        kills: how often.
        on_cpu: whether to use gloo.
        fails: whether an error of its device precedes the first death.

    Returns:
        How long it took to free the survivors and to form the next group.

    Raises:
        ProbeError: a rank was not freed or did not join, or its weights are not those of the updates that it counts.
    """
    found: list[str] = []
    ranks = [RankProcess(on_cpu) for _ in range(WORLD_SIZE)]
    store = open_store(HOST, timeout_s=RENDEZVOUS_TIMEOUT_S)
    try:
        for rank in ranks:
            rank.answer(Ready, START_TIMEOUT_S)
        for generation in range(1, kills + 2):
            is_last = generation == kills + 1
            for number, rank in enumerate(ranks):
                is_to_fail = fails and generation == 1 and number == WORLD_SIZE - 1
                rank.tell(
                    Train(
                        rank=number,
                        world_size=WORLD_SIZE,
                        generation=generation,
                        store_port=store.port,
                        communicators=communicators,
                        steps=LAST_STEPS if is_last else ENDLESS,
                        pause_s=0.0 if is_last else 0.01,
                        fails_at=FAILS_AT if is_to_fail else None,
                    )
                )
            joined = [rank.answer(Joined, RENDEZVOUS_TIMEOUT_S + 10) for rank in ranks]
            found.append(f"{joined[0].backend} formed in {max(j.seconds for j in joined):.1f} s")
            if is_last:
                for end in [rank.answer(Ended, FREED_TIMEOUT_S) for rank in ranks]:
                    refuse_unless(end, failed=False)
                found.append(f"{LAST_STEPS} steps more")
                return ", ".join(found)
            if fails and generation == 1:
                error = ranks[-1].answer(Ended, FREED_TIMEOUT_S).error
                found.append(f"the failed rank says {error}")
                if DEVICE_ERRORS[on_cpu] not in str(error):
                    raise ProbeError("which does not name the error of the device")
            else:
                time.sleep(TRAINED_S)
            found.append(_survived(ranks, generation))
            ranks[-1] = RankProcess(on_cpu)
            ranks[-1].answer(Ready, START_TIMEOUT_S)
        raise AssertionError("the last generation returns")
    except ProbeError as e:
        raise ProbeError(", ".join([*found, str(e)])) from e
    finally:
        for rank in ranks:
            rank.kill()


def _survived(ranks: list[RankProcess], generation: int) -> str:
    """Kill the last rank and free the others, in the order that the driver keeps: all are marked before any aborts."""
    *survivors, lost = ranks
    lost.kill()
    killed = time.monotonic()
    time.sleep(0.3)  # as long as a driver may take to learn of it
    records = []
    for order, kind in ((Record(), Recorded), (Abandon(generation), Marked), (Abort(generation), Aborted)):
        for rank in survivors:
            rank.tell(order)
        records.append([rank.answer(kind, FREED_TIMEOUT_S) for rank in survivors])
    for rank in survivors:
        refuse_unless(rank.answer(Ended, FREED_TIMEOUT_S), failed=True)
    seconds = time.monotonic() - killed
    recorded, _, aborted = records
    operations = min(record.operations for record in recorded if isinstance(record, Recorded))
    if operations <= 0:
        raise ProbeError("the flight recorder cannot be read" if operations else "the flight recorder is empty")
    abort_s = max(abort.seconds for abort in aborted if isinstance(abort, Aborted))
    return f"freed {seconds:.1f} s after a kill (abort {abort_s:.2f} s) with exact weights"


def refuse_unless(end: Ended, *, failed: bool) -> None:
    """Raise unless a training has ended as expected, with exact weights.

    Raises:
        ProbeError: it has not.
    """
    if (end.error is not None) != failed:
        raise ProbeError(f"a rank ended at step {end.step} with {end.error or 'no error'}")
    if not end.exact:
        raise ProbeError(f"the weights of a rank are wrong at step {end.step}; it ended with {end.error or 'no error'}")

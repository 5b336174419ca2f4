"""What a survivor with a GPU holds after a failure, with a fake stream that goes on with garbage after an abort."""

import contextlib
import functools
import random
import threading
import time

import pytest
import torch

from helpers.ranks.fake_stream import FakeEvent, FakeStream
from helpers.records.runs import wait_for
from orchestrator.strategies.update.confirmation import POLL_S, Confirmation, confirmation, no_confirmation
from orchestrator.worker.control.control import AbandonedError, StepGate

GARBAGE = -1


class Survivor:
    """A rank that trains on a fake stream. ``made`` has the gradient of each update that its parameters contain."""

    def __init__(self, stream: FakeStream, *, waits: bool):
        self.gate = StepGate(timeout_s=60)
        self.stream = stream
        self.step = 0
        self.made: list[int] = []
        self._gradient = 0
        check = functools.partial(self.gate.check, 1)
        self._confirm = Confirmation(check, waits=waits, record=stream.record)

    def train(self, peers: list[threading.Event]) -> None:
        """Make a step for each of ``peers``, whose event says that the other ranks take part in it."""
        for step, others in enumerate(peers, start=1):
            self.gate.begin(step, 1)
            self.stream.all_reduce(others, functools.partial(self._receive, step))
            self._confirm()
            self.stream.enqueue(self._update)
            self.step = step

    def lose_the_others(self, *, abort_after_s: float) -> None:
        """What the control thread does when the driver ends the generation."""
        self.gate.abandon(1)
        time.sleep(abort_after_s)
        self.stream.abort()

    def _receive(self, step: int, aborted: bool) -> None:
        self._gradient = GARBAGE if aborted else step

    def _update(self) -> None:
        self.made.append(self._gradient)


def lose_a_rank(chance: random.Random, *, waits: bool, run_ahead: bool = False) -> Survivor:
    """Train until the other ranks are lost, in a step and at a moment of chance."""
    peers = [threading.Event() for _ in range(8)]
    with FakeStream() as stream:
        survivor = Survivor(stream, waits=waits)

        def others() -> None:
            for event in peers[: 0 if run_ahead else chance.randrange(len(peers))]:
                event.set()
                time.sleep(chance.uniform(0, 5e-4))
            if run_ahead:
                wait_for(lambda: survivor.step == len(peers), poll_s=0.001)
            survivor.lose_the_others(abort_after_s=chance.uniform(0, 1e-3))

        thread = threading.Thread(target=others)
        thread.start()
        with contextlib.suppress(AbandonedError):
            survivor.train(peers)
        thread.join(10)
        stream.synchronize()
    return survivor


@pytest.mark.parametrize("seed", range(40))
def test_a_survivor_has_made_the_updates_of_its_steps_once_and_none_from_garbage(seed: int) -> None:
    survivor = lose_a_rank(random.Random(seed), waits=True)
    assert survivor.made == list(range(1, survivor.step + 1))


def test_the_fake_stream_makes_garbage_of_a_step_that_does_not_wait() -> None:
    survivor = lose_a_rank(random.Random(0), waits=False, run_ahead=True)
    assert GARBAGE in survivor.made


def ended() -> None:
    raise AbandonedError("ended")


def test_a_mark_frees_the_host_although_nothing_is_aborted() -> None:
    checks = iter([None, None, AbandonedError("ended")])

    def check() -> None:
        if (error := next(checks)) is not None:
            raise error

    with pytest.raises(AbandonedError):
        Confirmation(check, waits=True, record=FakeEvent)()


def test_what_completes_after_the_mark_is_not_confirmed() -> None:
    def complete() -> FakeEvent:
        event = FakeEvent()
        event.reached.set()
        return event

    Confirmation(lambda: None, waits=True, record=complete)()
    for waits in (True, False):
        with pytest.raises(AbandonedError):
            Confirmation(ended, waits=waits, record=complete)()


class Queried:
    """A point that the device has reached when it is asked for the third time."""

    def __init__(self) -> None:
        self.queries = 0

    def query(self) -> bool:
        self.queries += 1
        return self.queries == 3


@pytest.mark.parametrize(("spin_s", "pauses"), [(60.0, []), (-1.0, [POLL_S, POLL_S])], ids=["short", "long"])
def test_only_a_long_wait_has_pauses(monkeypatch: pytest.MonkeyPatch, spin_s: float, pauses: list[float]) -> None:
    made: list[float] = []
    monkeypatch.setattr(time, "sleep", made.append)
    Confirmation(lambda: None, waits=True, record=Queried, spin_s=spin_s)()
    assert made == pauses


@pytest.mark.parametrize(
    ("device", "has_peers", "recovers", "waits"),
    [("cpu", True, True, None), ("cuda", False, True, None), ("cuda", True, True, True), ("cuda", True, False, False)],
)
def test_only_a_rank_with_a_gpu_and_peers_confirms(
    device: str, has_peers: bool, recovers: bool, waits: bool | None
) -> None:
    found = confirmation(torch.device(device), ended, has_peers=has_peers, recovers=recovers)
    if waits is None:
        assert found is no_confirmation
    else:
        assert isinstance(found, Confirmation)
        assert found._waits == waits

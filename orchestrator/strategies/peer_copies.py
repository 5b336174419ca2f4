"""Copies of the states of stages, or of shards, in the memory of their neighbours, for the day that one is lost.

Every so many steps each rank takes a snapshot of its own state and passes it to the next one of its pipeline, or the
next shard, in the background and through a group of its own. The last two of its own and of the neighbour before it are
kept: a rank takes its next snapshot once the one before has arrived everywhere, so there is always one that is whole.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from orchestrator.state.train_state import TrainState
from orchestrator.state.transport import receive_state, send_state

KEPT = 2
CPU = torch.device("cpu")

States = dict[int, TrainState]
"""By the step after which they were taken."""


class PeerCopies:
    """What this rank keeps. The copies outlive the groups; :meth:`attach` begins with a new one."""

    def __init__(self) -> None:
        self._own: States = {}
        self._neighbours: States = {}
        self._lock = threading.Lock()
        self._work: queue.Queue[TrainState | None] = queue.Queue()

    def attach(self, group: dist.ProcessGroup, ring: Sequence[int], *, rank: int) -> None:
        """Exchange through ``group``, a gloo group of the ranks of ``ring``, from now on."""
        place = ring.index(rank)
        self._goes_first = place % 2 == 0
        self._before, self._after = ring[place - 1], ring[(place + 1) % len(ring)]
        self._work = queue.Queue()
        threading.Thread(target=self._exchange, args=(group, self._work), name="peer-copies", daemon=True).start()

    def submit(self, take: Callable[[TrainState | None], TrainState]) -> None:
        """Have a snapshot passed on; waits until the one before it has arrived everywhere.

        ``take`` makes it, in the memory of the old one that it is given, if any.
        """
        self._work.join()
        with self._lock:
            old = _oldest(self._own)
        state = take(old)
        with self._lock:
            self._own[state.step] = state
        self._work.put(state)

    def own(self, step: int) -> TrainState:
        """This rank's own snapshot."""
        with self._lock:
            return self._own[step]

    def neighbours(self, step: int) -> TrainState:
        """The copy of the rank before it."""
        with self._lock:
            return self._neighbours[step]

    @property
    def own_steps(self) -> tuple[int, ...]:
        """After which steps this rank's own snapshots were taken."""
        with self._lock:
            return tuple(self._own)

    @property
    def neighbours_steps(self) -> tuple[int, ...]:
        """After which steps the copies of the rank before it were taken."""
        with self._lock:
            return tuple(self._neighbours)

    def forget_after(self, step: int) -> None:
        """The run goes on from ``step``: later copies will be taken again."""
        with self._lock:
            for states in (self._own, self._neighbours):
                for later in [s for s in states if s > step]:
                    del states[later]

    def detach(self) -> None:
        """The group is about to end; an exchange that is under way fails by that."""
        self._work.put(None)

    def _exchange(self, group: dist.ProcessGroup, work: queue.Queue[TrainState | None]) -> None:
        while (state := work.get()) is not None:
            # A neighbour may be gone, or the group: the training thread will see that for itself.
            with contextlib.suppress(RuntimeError, ValueError):
                copy = self._swap(state, group)
                with self._lock:
                    self._neighbours[copy.step] = copy
                dist.barrier(group)
            work.task_done()

    def _swap(self, state: TrainState, group: dist.ProcessGroup) -> TrainState:
        with self._lock:
            into = _oldest(self._neighbours)

        def receive() -> TrainState:
            return receive_state(self._before, device=CPU, group=group, into=into)

        # In turns: a worker that sends waits for the one that receives.
        copy = None if self._goes_first else receive()
        send_state(state, to=self._after, device=CPU, group=group)
        return copy if copy is not None else receive()


def _oldest(states: States) -> TrainState | None:
    """The one whose memory may be used, taken out, once there are enough."""
    return states.pop(min(states)) if len(states) == KEPT else None

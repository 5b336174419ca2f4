"""Copies of the stages' states in the memory of their neighbours, for the day that a worker is lost.

Every so many steps each worker takes a snapshot of its own state and passes it to the next worker of its pipeline, in
the background and through a group of its own. The last two of its own and of the neighbour before it are kept: while
one is on its way, the one before is whole on all workers.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from orchestrator.worker.state import TrainState
from orchestrator.worker.transfer import receive_state, send_state

KEPT = 2
CPU = torch.device("cpu")

States = dict[int, TrainState]
"""By the step after which they were taken."""


class PeerCopies:
    """What this worker keeps. The copies outlive the groups; :meth:`attach` begins with a new one."""

    def __init__(self, pipeline: Sequence[int], *, rank: int):
        self._place = list(pipeline).index(rank)
        self._after = pipeline[(self._place + 1) % len(pipeline)]
        self._before = pipeline[self._place - 1]
        self._own: States = {}
        self._neighbours: States = {}
        self._lock = threading.Lock()
        self._work: queue.Queue[TrainState | None] = queue.Queue()

    def attach(self, group: dist.ProcessGroup) -> None:
        """Exchange through ``group``, a gloo group of the pipeline's workers, from now on."""
        self._work = queue.Queue()
        threading.Thread(target=self._exchange, args=(group, self._work), name="peer-copies", daemon=True).start()

    def submit(self, state: TrainState, *, step: int) -> None:
        """Keep a snapshot and have it passed on; waits for the one before it."""
        self._work.join()
        with self._lock:
            _keep(self._own, step, state)
        self._work.put(state)

    def own(self, step: int) -> TrainState:
        """This worker's own snapshot."""
        with self._lock:
            return self._own[step]

    def neighbours(self, step: int) -> TrainState:
        """The copy of the worker before it."""
        with self._lock:
            return self._neighbours[step]

    def held(self, rank: int) -> Mapping[int, tuple[int, ...]]:
        """The ranks whose states are here, ``rank`` being this one, and after which steps."""
        with self._lock:
            return {rank: tuple(self._own), self._before: tuple(self._neighbours)}

    def reusable(self) -> TrainState | None:
        """The memory of the oldest own snapshot, once there are enough; the one before the next stays whole."""
        self._work.join()
        with self._lock:
            return self._own.pop(min(self._own)) if len(self._own) == KEPT else None

    def detach(self) -> None:
        """The group is about to end; an exchange that is under way fails by that."""
        self._work.put(None)

    def _exchange(self, group: dist.ProcessGroup, work: queue.Queue[TrainState | None]) -> None:
        while (state := work.get()) is not None:
            try:
                # In turns: a worker that sends waits for the one that receives.
                if self._place % 2 == 0:
                    send_state(state, to=self._after, device=CPU, group=group)
                    copy = receive_state(self._before, device=CPU, group=group)
                else:
                    copy = receive_state(self._before, device=CPU, group=group)
                    send_state(state, to=self._after, device=CPU, group=group)
            except (RuntimeError, ValueError):
                continue  # a neighbour is gone, or the group: the training thread will see that for itself
            finally:
                work.task_done()
            with self._lock:
                _keep(self._neighbours, copy.step, copy)


def _keep(states: States, step: int, state: TrainState) -> None:
    states[step] = state
    while len(states) > KEPT:
        del states[min(states)]

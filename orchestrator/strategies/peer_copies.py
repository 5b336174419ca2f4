"""Copies of the state of stages or parameter shards in the memory of a neighbouring rank, for recovery.

Every ``recovery.peer_copy_every`` steps each rank takes a snapshot of its own state. A background thread sends it to
the next rank of the ring (the pipeline, or the shards) through a process group of its own. Each rank keeps its last two
snapshots and the last two of the preceding rank. It takes the next snapshot only after the previous one has arrived
everywhere, so that one complete set of copies always exists.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from orchestrator.state.train_state import TrainState
from orchestrator.state.transport import receive_state, send_state

KEPT = 2
WAIT_S = 60.0
"""How long the background thread waits for a snapshot before it waits again."""

CPU = torch.device("cpu")

States = dict[int, TrainState]
"""Snapshots by the step after which they were taken."""


class PeerCopies:
    """The snapshots that one rank keeps. They outlive the process group; :meth:`attach` connects to a new one."""

    def __init__(self) -> None:
        self._own: States = {}
        self._neighbours: States = {}
        self._lock = threading.Lock()
        self._work: queue.Queue[TrainState | None] = queue.Queue()
        self._error: Exception | None = None

    def attach(self, group: dist.ProcessGroup, ring: Sequence[int], *, rank: int) -> None:
        """Start to exchange snapshots.

        Args:
            group: A gloo group of the ranks of ``ring``, used for nothing else.
            ring: Global ranks; each sends to the next one, and the last one to the first.
            rank: This global rank.
        """
        place = ring.index(rank)
        self._sends_first = place % 2 == 0
        self._previous, self._next = ring[place - 1], ring[(place + 1) % len(ring)]
        self._work, self._error = queue.Queue(), None
        threading.Thread(target=self._exchange, args=(group, self._work), name="peer-copies", daemon=True).start()

    def submit(self, take: Callable[[TrainState | None], TrainState]) -> None:
        """Take a snapshot and send it in the background. Waits until the previous one has arrived everywhere.

        Args:
            take: Returns the snapshot; its argument is an old one whose memory it may reuse, or None.

        Raises:
            Exception: The background thread failed, for a reason other than a lost rank.
        """
        self._work.join()
        if self._error is not None:
            raise self._error
        with self._lock:
            old = _reusable(self._own)
        state = take(old)
        with self._lock:
            self._own[state.step] = state
        self._work.put(state)

    def own(self, step: int) -> TrainState:
        """Return this rank's own snapshot after ``step``."""
        with self._lock:
            return self._own[step]

    def neighbours(self, step: int) -> TrainState:
        """Return the copy of the preceding rank's snapshot after ``step``."""
        with self._lock:
            return self._neighbours[step]

    @property
    def own_steps(self) -> tuple[int, ...]:
        """The steps of this rank's own snapshots."""
        with self._lock:
            return tuple(self._own)

    @property
    def neighbours_steps(self) -> tuple[int, ...]:
        """The steps of the copies of the preceding rank."""
        with self._lock:
            return tuple(self._neighbours)

    def forget_after(self, step: int) -> None:
        """Drop snapshots of later steps, because the run continues from ``step``."""
        with self._lock:
            for states in (self._own, self._neighbours):
                for later in [s for s in states if s > step]:
                    del states[later]

    def detach(self) -> None:
        """Stop the background thread. An exchange in progress fails when the process group is destroyed."""
        self._work.put(None)

    def _exchange(self, group: dist.ProcessGroup, work: queue.Queue[TrainState | None]) -> None:
        while True:
            try:
                state = work.get(timeout=WAIT_S)
            except queue.Empty:
                continue
            try:
                if state is None:
                    return
                copy = self._swap(state, group)
                with self._lock:
                    self._neighbours[copy.step] = copy
                dist.barrier(group)
            except (RuntimeError, ValueError):
                pass  # a neighbour or the group is lost, which the training thread notices itself
            except Exception as e:
                self._error = e.with_traceback(None)  # the traceback would keep the group alive
            finally:
                work.task_done()

    def _swap(self, state: TrainState, group: dist.ProcessGroup) -> TrainState:
        with self._lock:
            into = _reusable(self._neighbours)

        def receive() -> TrainState:
            return receive_state(self._previous, device=CPU, group=group, into=into)

        # Ranks at even places send first: if all did, all would wait for a receiver.
        copy = None if self._sends_first else receive()
        send_state(state, to=self._next, device=CPU, group=group)
        return copy if copy is not None else receive()


def _reusable(states: States) -> TrainState | None:
    """Remove and return the oldest snapshot once there are ``KEPT``, so that its memory can be reused."""
    return states.pop(min(states)) if len(states) == KEPT else None

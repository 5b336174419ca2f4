"""Copies of the state of stages or shards in the memory of a neighbouring rank, for recovery.

Every ``recovery.peer_copy_every`` steps each rank takes a snapshot of its own state. A background thread sends it to
the next rank of its ring through a process group of its own. Each rank keeps its last
two snapshots and the last two of the preceding rank. It takes the next snapshot only after the previous one has arrived
everywhere, so that one complete set of copies always exists.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

from orchestrator.state.train_state import TrainState
from orchestrator.state.transport import CPU, receive_state, send_state

KEPT = 2
"""The snapshots that a rank keeps of its own state, and of its neighbour's: 4 in all."""

States = dict[int, TrainState]
"""Snapshots by the step after which they were taken."""


@dataclass
class _Exchange:
    """What the background thread of one process group does.

    Attributes:
        work: the snapshots to send; None ends the thread.
        error: why it failed.
    """

    work: queue.Queue[TrainState | None] = field(default_factory=queue.Queue)
    error: Exception | None = None


class PeerCopies:
    """The snapshots that one rank keeps. They outlive the process group; :meth:`attach` connects to a new one."""

    def __init__(self) -> None:
        self._own: States = {}
        self._neighbours: States = {}
        self._lock = threading.Lock()
        self._exchange = _Exchange()

    def attach(self, group: dist.ProcessGroup, ring: Sequence[int], *, rank: int) -> None:
        """Start to exchange snapshots.

        Args:
            group: a gloo group of the ranks of ``ring``, used for nothing else.
            ring: global ranks; each sends to the next one, and the last one to the first.
        """
        place = ring.index(rank)
        self._sends_first = place % 2 == 0
        self._previous, self._next = ring[place - 1], ring[(place + 1) % len(ring)]
        self._exchange = _Exchange()
        threading.Thread(target=self._run, args=(self._exchange, group), name="peer-copies", daemon=True).start()

    def submit(self, take: Callable[[TrainState | None], TrainState]) -> None:
        """Take a snapshot and send it in the background. Waits until the previous one has arrived everywhere.

        Args:
            take: returns the snapshot; its argument is an old one whose memory it may reuse, or None.

        Raises:
            Exception: the previous exchange failed.
        """
        self._exchange.work.join()
        if self._exchange.error is not None:
            raise self._exchange.error
        with self._lock:
            old = _reusable(self._own)
        state = take(old)
        with self._lock:
            self._own[state.step] = state
        self._exchange.work.put(state)

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
        self._exchange.work.put(None)

    def _run(self, exchange: _Exchange, group: dist.ProcessGroup) -> None:
        # Without a timeout: the thread is a daemon, and detach() ends the wait.
        while (state := exchange.work.get()) is not None:
            try:
                copy = self._swap(state, group)
                with self._lock:
                    self._neighbours[copy.step] = copy
                dist.barrier(group)
            except Exception as e:
                exchange.error = e.with_traceback(None)  # the traceback would keep the group alive
            finally:
                exchange.work.task_done()

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

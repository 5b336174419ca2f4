"""Receives the pushes of asynchronous workers in the order in which they arrive.

Each worker has a thread. Gloo can wait for a message from any sender, but that wait does not end when a connection
closes.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping

import torch.distributed as dist

from orchestrator.strategies.asynchronous.parameter_server.wire import Push


class PushReceiver:
    """Receives one push per worker at a time, each in the worker's own buffer."""

    def __init__(self, pushes: Mapping[int, Push], group: dist.ProcessGroup):
        """Start to receive.

        Args:
            pushes: the buffer of each worker.
            group: the group through which the workers push.
        """
        self._pushes = pushes
        self._arrived: queue.SimpleQueue[tuple[int, Exception | None]] = queue.SimpleQueue()
        self._free = {worker: threading.Semaphore() for worker in pushes}
        self._ended = False
        for worker in pushes:
            threading.Thread(target=self._receive, args=(worker, group), name=f"push-{worker}", daemon=True).start()

    def next(self) -> tuple[int, Push]:
        """Wait for the next push and return its worker and its buffer, which is in use until :meth:`free`.

        Raises:
            RuntimeError: the connection to a worker is closed.
        """
        worker, error = self._arrived.get()
        if error is not None:
            raise error
        return worker, self._pushes[worker]

    def free(self, worker: int) -> None:
        """Let the worker's buffer be overwritten by its next push."""
        self._free[worker].release()

    def end(self) -> None:
        """Stop the threads. A receive in progress ends when its worker leaves the group."""
        self._ended = True
        for worker in self._free:
            self.free(worker)

    def _receive(self, worker: int, group: dist.ProcessGroup) -> None:
        error: Exception | None = None
        while error is None:
            self._free[worker].acquire()  # without a timeout: the thread is a daemon, and end() ends the wait
            if self._ended:
                return
            try:
                self._pushes[worker].expect(worker, group).wait()
                self._pushes[worker].complete(worker, group)
            except Exception as e:
                error = e.with_traceback(None)  # the traceback would keep the group alive
            self._arrived.put((worker, error))

"""The stream of a GPU, on a thread: it runs what the host has enqueued, in order, while the host goes on."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class FakeEvent:
    """A point in the work of a stream."""

    def __init__(self) -> None:
        self.reached = threading.Event()

    def query(self) -> bool:
        return self.reached.is_set()


class FakeStream:
    """Use as a context manager, which ends its thread."""

    def __init__(self) -> None:
        self._aborted = threading.Event()
        self._work: queue.Queue[Callable[[], object] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def __enter__(self) -> FakeStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()
        self._work.put(None)
        self._thread.join(10)
        assert not self._thread.is_alive()

    def enqueue(self, kernel: Callable[[], object]) -> None:
        self._work.put(kernel)

    def all_reduce(self, peers: threading.Event, done: Callable[[bool], object]) -> None:
        """Enqueue an operation that ends when the ``peers`` take part or it is aborted: ``done(aborted)``."""

        def kernel() -> None:
            while not peers.wait(1e-4) and not self._aborted.is_set():
                pass
            done(self._aborted.is_set())

        self.enqueue(kernel)

    def record(self) -> FakeEvent:
        event = FakeEvent()
        self.enqueue(event.reached.set)
        return event

    def abort(self) -> None:
        self._aborted.set()

    def synchronize(self) -> None:
        assert self.record().reached.wait(10)

    def _run(self) -> None:
        while (kernel := self._work.get()) is not None:
            kernel()

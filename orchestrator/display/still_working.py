"""Signs of life of a verb that may take minutes, also in a log."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator

from orchestrator.display.text import writable

LINE_EVERY_S = 10.0


@contextlib.contextmanager
def still_working(line: Callable[[], str], *, every_s: float = LINE_EVERY_S) -> Iterator[None]:
    """Print ``line()`` to standard error every ``every_s`` seconds during the block."""
    ended = threading.Event()

    def work() -> None:
        while not ended.wait(every_s):
            print(writable(line(), sys.stderr), file=sys.stderr, flush=True)

    thread = threading.Thread(target=work, name="still working", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()

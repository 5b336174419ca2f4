"""Starting the driver again after its process has died, for example because its node was out of memory."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType

RESTART_DELAY_S = 1.0
"""The time in which Ray notices the death of a driver and releases its workers."""


def launch_with_restarts(words: Sequence[str], restarts: int) -> int:
    """Launch ``words`` in a child process; start it again with ``resume=auto`` if a signal kills it.

    The exit code of a child that ends by itself is the result, also if its training failed: the run has used its own
    means of recovery then. SIGINT and SIGTERM are passed on to the child.

    Args:
        words: the overrides.
        restarts: how often it is started again.

    Returns:
        The exit code of the last child; 128 plus the number of the signal that killed it.
    """
    remaining = restarts
    with _Forwarding() as forwarding:
        while True:
            code = forwarding.run([sys.executable, "-m", "orchestrator.launch", *words])
            if code >= 0:
                return code
            killed_by = signal.Signals(-code)
            if remaining == 0 or forwarding.stopped:
                return 128 + killed_by
            remaining -= 1
            print(
                f"the driver was killed by {killed_by.name}; starting it again with resume=auto "
                f"({restarts - remaining} of {restarts})",
                file=sys.stderr,
                flush=True,
            )
            words = resuming(words)
            time.sleep(RESTART_DELAY_S)


def resuming(words: Sequence[str]) -> list[str]:
    """Return the overrides with ``resume=auto``, unless they name a run to resume."""
    kept = [w for w in words if w != "resume=never"]
    return kept if any(w.startswith("resume=") for w in kept) else [*kept, "resume=auto"]


class _Forwarding:
    """While in the context, passes SIGINT and SIGTERM on to the child that runs.

    ``stopped``: whether such a signal has come.
    """

    def __init__(self) -> None:
        self.stopped = False
        self._child: subprocess.Popen[bytes] | None = None

    def run(self, command: Sequence[str]) -> int:
        self._child = subprocess.Popen(command)
        return self._child.wait()

    def _forward(self, number: int, _: FrameType | None) -> None:
        self.stopped = True
        if self._child is not None:
            self._child.send_signal(number)

    def __enter__(self) -> _Forwarding:
        self._previous = {n: signal.signal(n, self._forward) for n in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

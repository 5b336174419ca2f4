"""Starting the driver again after its process has died, for example because its node was out of memory."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType

from orchestrator.compat.ray_job import submission_id

RESTART_DELAY_S = 1.0
"""The time in which Ray notices the death of a driver and releases its workers."""


def launch_with_restarts(words: Sequence[str], restarts: int) -> int:
    """Launch ``words`` in a child process; start it again with ``resume=auto`` if a signal kills it.

    The exit code of a child that ends by itself is the result, also if its training failed: the run has used its own
    means of recovery then. SIGINT and SIGTERM are passed on to the child, unless this is a submitted job: Ray sends
    the signal to each process of a job, and a second one would end the child without a checkpoint.

    Args:
        words: the overrides.
        restarts: how often it is started again.

    Returns:
        The exit code of the last child; 128 plus the number of the signal that killed it.
    """
    number = 0
    with Child(forward=submission_id() is None) as child:
        while (code := child.run([sys.executable, "-m", "orchestrator.launch", *words])) < 0:
            if number == restarts or child.stop_signal is not None:
                return 128 - code
            number += 1
            print(
                f"the driver was killed by {signal.Signals(-code).name}; starting it again with resume=auto "
                f"({number} of {restarts})",
                file=sys.stderr,
                flush=True,
            )
            words = resuming(words)
            time.sleep(RESTART_DELAY_S)
            if child.stop_signal is not None:
                return 128 + child.stop_signal
    return code


def resuming(words: Sequence[str]) -> list[str]:
    """Return the overrides with ``resume=auto``, unless they name a run to resume."""
    kept = [w for w in words if w != "resume=never"]
    return kept if any(w.startswith("resume=") for w in kept) else [*kept, "resume=auto"]


class Child:
    """The driver's process, one after another. While in the context, a signal to stop does not end this process.

    ``forward``: pass SIGINT and SIGTERM on to the child.
    ``stop_signal``: the last such signal; None if none has come.
    """

    def __init__(self, *, forward: bool) -> None:
        self.stop_signal: int | None = None
        self._forward = forward
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, command: Sequence[str]) -> int:
        """Run the next child; returns its exit code, or minus the number of the signal that killed it."""
        self._process = subprocess.Popen(command)
        return self._process.wait()

    def _handle(self, number: int, _: FrameType | None) -> None:
        self.stop_signal = number
        if self._forward and self._process is not None:
            self._process.send_signal(number)

    def __enter__(self) -> Child:
        self._previous = {n: signal.signal(n, self._handle) for n in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

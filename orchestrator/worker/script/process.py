"""The process of a script: its start, its output, its end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence

import psutil

from orchestrator.records.process import end_with_parent

IDLE_SHARE = 0.02
"""A script that uses a smaller share of a CPU, with its children, does nothing."""


class ScriptProcess:
    """A program in a process group of its own, which ends with the thread that has started it.

    Attributes:
        output: the descriptor from which its stdout and stderr are read.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]):
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: end_with_parent(signal.SIGKILL),
        )
        assert self._process.stdout is not None
        self.output = self._process.stdout.fileno()
        self._cpu_s = 0.0

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_code(self) -> int | None:
        """Return the exit code, negative for a signal; None as long as the script runs."""
        return self._process.poll()

    def wait(self) -> None:
        """Wait for its end."""
        self._process.wait()

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the script and the processes that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def abort(self) -> None:
        """Send SIGABRT to the script alone, at which a Python process with a fault handler writes its stacks."""
        if self.exit_code() is None:
            self._process.send_signal(signal.SIGABRT)

    def close(self) -> None:
        """Kill the script with the processes that it has started, unless it has ended in order: they may go on then."""
        if self.exit_code() != 0:
            self.send(signal.SIGKILL)
            self.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def has_worked(self, seconds: float) -> bool:
        """Return whether it has computed in the ``seconds`` since the last call, with its children."""
        used_s = 0.0
        with contextlib.suppress(psutil.Error):
            script = psutil.Process(self._process.pid)
            for process in (script, *script.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    times = process.cpu_times()
                    used_s += times.user + times.system
        worked_s, self._cpu_s = used_s - self._cpu_s, used_s
        return worked_s > IDLE_SHARE * seconds

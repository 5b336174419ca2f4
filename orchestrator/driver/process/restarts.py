"""Starting the driver again after its process has died, and the last lines of a run whose driver could not write them.

A driver dies without a verdict if the kernel kills it, for example because its node is out of memory, or if Ray ends
it. The process that has started it outlives it, and knows from its reports which run it has left.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import FrameType

from orchestrator.compat.ray_job import submission_id
from orchestrator.config.redact import Redactor
from orchestrator.config.text import path_override
from orchestrator.driver.process.origin import ReportedRun, read_reports, variables
from orchestrator.driver.process.signals import stop_signals

DRIVER = (sys.executable, "-m", "orchestrator.launch")
RESTART_DELAY_S = 1.0
"""The time in which Ray notices the death of a driver and releases its workers."""
_STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM, 128 + signal.SIGHUP)
"""The exit codes of a driver that a second signal has ended at once."""


@dataclass(frozen=True, kw_only=True)
class DriverEnd:
    """How a driver has ended.

    Attributes:
        code: its exit code, or minus the number of the signal that killed it.
        run: the run that it has reported; None if it had none yet.
        is_reported: whether it has reported the end of the run.
    """

    code: int
    run: ReportedRun | None
    is_reported: bool

    @property
    def has_died(self) -> bool:
        """Whether it was killed, or ended by a library in the middle of a run."""
        return self.code < 0 or (self.run is not None and not self.is_reported)

    @property
    def exit_code(self) -> int:
        """The exit code for a shell."""
        return 128 - self.code if self.code < 0 else self.code

    def __str__(self) -> str:
        if self.code < 0:
            return f"the driver was killed by {signal.Signals(-self.code).name}"
        return f"the driver ended with exit code {self.code}, without a verdict"


def launch_with_restarts(words: Sequence[str], restarts: int, redactor: Redactor) -> int:
    """Launch ``words`` in a child process; start it again if it dies in the middle of a run.

    It then continues the run that it has left and no other, or begins a new one if that run has no checkpoint. A child
    that ends by itself is not started again, also if its training failed: the run has used its own means of recovery
    then. Signals to stop are passed on to the child, unless this is a submitted job: Ray sends the signal to each
    process of a job, and a second one would end the child without a checkpoint.

    Args:
        restarts: how often it is started again.
        redactor: masks secrets in the command that is suggested at the end.

    Returns:
        The exit code of the last child; 128 plus the number of the signal that killed it. 0 if the run had finished.
    """
    number = 0
    left: ReportedRun | None = None
    with Child(forward=submission_id() is None) as child:
        while (end := child.run([*DRIVER, *words], left)).has_died:
            left, how = end.run or left, str(end)
            is_over = left is not None and left.final_state is not None
            is_stopped = child.stop_signal is not None or end.code in _STOPPED
            if is_over or is_stopped or number == restarts:
                break
            number += 1
            print(f"{how}; starting it again ({number} of {restarts})", file=sys.stderr, flush=True)
            time.sleep(RESTART_DELAY_S)
            if child.stop_signal is not None:
                end = replace(end, code=128 + child.stop_signal)
                break
    if left is None and end.code == 0 and not end.is_reported:  # os._exit(0) in the code of the job
        print(f"{end}: code of the job has ended its process", file=sys.stderr, flush=True)
        return 1
    if left is None or end.is_reported:
        return end.exit_code
    print("\n".join(_verdict(left, how, words, redactor)), file=sys.stderr, flush=True)
    return 0 if left.final_state == "finished" else end.exit_code


def _verdict(run: ReportedRun, how: str, words: Sequence[str], redactor: Redactor) -> Iterator[str]:
    """Yield the last lines of a run; ``how`` says how its driver died."""
    from orchestrator.config.overrides import masked  # imports Hydra, which takes a second
    from orchestrator.driver.process.origin import this_origin

    state = run.final_state
    yield f"died: {how}" if state is None else f"{state}: afterwards {how}"
    yield f"run directory: {run.location}"
    if state is None and run.may_have_checkpoint:
        resume = path_override("resume", run.location)
        kept = [masked(word, redactor) for word in words if not word.startswith("resume=")]
        yield f"next: {shlex.join(this_origin().relaunch([*kept, resume]))}"


class Child:
    """The driver's process, one after another. While in the context, a signal to stop does not end this process.

    Attributes:
        forward: pass signals to stop on to the child.
        stop_signal: the last such signal; None if none has come.
    """

    def __init__(self, *, forward: bool) -> None:
        self.stop_signal: int | None = None
        self._forward = forward
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, command: Sequence[str], left: ReportedRun | None = None) -> DriverEnd:
        """Run the next child, which continues the run that another one has ``left``; returns how it has ended."""
        reports, descriptor = os.pipe()
        try:
            self._process = subprocess.Popen(
                command, env={**os.environ, **variables(descriptor, left)}, pass_fds=[descriptor]
            )
        finally:
            os.close(descriptor)
        if self.stop_signal is not None:  # it came while the child was started
            self._pass_on(self.stop_signal)
        code = self._process.wait()
        run, is_reported = read_reports(reports)
        os.close(reports)
        return DriverEnd(code=code, run=run, is_reported=is_reported)

    def _handle(self, number: int, _: FrameType | None) -> None:
        self.stop_signal = number
        self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        if self._forward and self._process is not None:
            self._process.send_signal(number)

    def __enter__(self) -> Child:
        self._previous = {n: signal.signal(n, self._handle) for n in stop_signals()}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

"""The runs of a sweep side by side on one cluster, each with a driver process of its own."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

from orchestrator.config.build import ConfigError
from orchestrator.driver.process.run_context import RunResult
from orchestrator.driver.process.signals import StopSignals
from orchestrator.planning.plan import Node, Plan
from orchestrator.records.sweep_dir import carried, runs_of

if TYPE_CHECKING:
    from orchestrator.features.sweep.sweep import Sweep

_POLL_S = 0.2


def num_at_once(plans: Sequence[Plan], nodes: Sequence[Node]) -> int:
    """Return how many of the largest runs the nodes have room for, at least 1."""
    room = len(plans)
    for plan in plans:
        workers = plan.world_size + plan.spares
        room = min(room, int(sum(n.cpus for n in nodes) / (workers * plan.cpus_per_worker)))
        if plan.gpus_per_worker:
            room = min(room, sum(n.gpus for n in nodes) // (workers * plan.gpus_per_worker))
    return max(1, room)


def run_side_by_side(runs: Sequence[tuple[str, ...]], sweep: Sweep, stop: StopSignals) -> list[RunResult]:
    """Execute the runs with these overrides, ``sweep.at_once`` at a time.

    A signal is passed on to those in progress, and no other starts.

    Returns:
        The results of the runs that have a directory.
    """
    drivers = _Drivers(sweep)
    with ThreadPoolExecutor(sweep.at_once) as pool:
        futures = [pool.submit(sweep.run, run, functools.partial(drivers.execute, run)) for run in runs]
        while wait(futures, timeout=_POLL_S).not_done:
            if stop.received is not None and drivers.stopped_by is None:
                pool.shutdown(wait=False, cancel_futures=True)
                drivers.stop(stop.received)
    sweep.note_stop(stop)
    return [result for f in futures if not f.cancelled() and (result := f.result()) is not None]


class _Drivers:
    """The processes of the runs in progress.

    Attributes:
        stopped_by: the signal that they were sent.
    """

    def __init__(self, sweep: Sweep) -> None:
        self.stopped_by: signal.Signals | None = None
        self._sweep = sweep
        self._running: set[subprocess.Popen[str]] = set()
        self._lock = threading.Lock()

    def execute(self, overrides: tuple[str, ...], *, sweep: Mapping[str, str] | None) -> RunResult:
        """Execute one run in a process of its own, and print its output with the number of the run.

        Raises:
            ConfigError: it ended before it had a directory.
        """
        assert sweep is not None
        number = sweep["run"]
        with self._lock:
            process = subprocess.Popen(
                [sys.executable, "-m", "orchestrator.launch", *overrides],
                env={**os.environ, **carried(sweep), "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
            self._running.add(process)
            if self.stopped_by is not None:
                process.send_signal(self.stopped_by)
        assert process.stdout is not None
        for line in process.stdout:
            self._sweep.say(f"[{number}] {line.rstrip()}")
        exit_code = process.wait()
        with self._lock:
            self._running.remove(process)
        run_dir = runs_of(self._sweep.output, sweep["id"]).get(int(number))
        if run_dir is None:
            raise ConfigError([f"run {number} ended with exit code {exit_code} before it had a directory"])
        record = run_dir.read_record()
        return RunResult(
            status="FINISHED" if exit_code == 0 else "KILLED" if record.get("state") == "killed" else "FAILED",
            exit_code=exit_code if exit_code >= 0 else 128 - exit_code,
            run_dir=run_dir.path,
            url=run_dir.url,
            reason=str(record.get("reason", "")),
            summary=record.get("summary") or {},
        )

    def stop(self, number: signal.Signals) -> None:
        """Send a signal to the processes in progress, and to any that is about to start."""
        with self._lock:
            self.stopped_by = number
            for process in self._running:
                process.send_signal(number)

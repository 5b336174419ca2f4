"""What other programs take of the CPUs while a round of a benchmark runs, and the repetition of a disturbed round."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import psutil

from harness.arms import ENVIRONMENT

T = TypeVar("T")

QUIET_SHARE = 0.05
DISTURBED_FROM = float(os.environ.get("DISTURBED_FROM", QUIET_SHARE))
"""A round in which other programs used more than this share of the CPUs is repeated."""
ATTEMPTS = 3
_INTERVAL_S = 2.0
_MARKER = f"RAY_AUTH_TOKEN={ENVIRONMENT['RAY_AUTH_TOKEN']}".encode()
"""In the environment of every process that an arm starts, also of Ray's, whose parent is another one."""


class OtherPrograms:
    """The CPU time of all processes but this one and those of its arms, during a ``with`` block.

    A process that lives for less than two seconds may be missed.
    """

    def __init__(self) -> None:
        self.used_s: dict[int, float] = {}
        """CPU seconds of each process, by its id."""
        self._seen: dict[int, tuple[float, bool, float]] = {}
        """Of each process its creation, whether it is own, and its CPU seconds when it was last seen."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> OtherPrograms:
        self._began, self._stolen_s = time.monotonic(), _stolen_s()
        self._look(first=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._look()
        self._wall_s = time.monotonic() - self._began
        self._stolen_s = _stolen_s() - self._stolen_s

    @property
    def share(self) -> float:
        """Of the CPUs that this process may use, including what the host of a virtual machine has taken."""
        cpus = len(os.sched_getaffinity(0))
        return (sum(self.used_s.values()) + self._stolen_s) / (self._wall_s * cpus)

    def _watch(self) -> None:
        while not self._ended.wait(_INTERVAL_S):
            self._look()

    def _look(self, *, first: bool = False) -> None:
        for process in psutil.process_iter():
            try:
                times, created = process.cpu_times(), process.create_time()
                known = self._seen.get(process.pid)
                if known is None or known[0] != created:
                    own = self._is_own(process)
                    known = created, own, times.user + times.system if first else 0.0
            except (psutil.Error, OSError):
                continue
            _, own, before_s = known
            now_s = times.user + times.system
            if not own:
                self.used_s[process.pid] = self.used_s.get(process.pid, 0.0) + now_s - before_s
            self._seen[process.pid] = created, own, now_s

    def _is_own(self, process: psutil.Process) -> bool:
        """Whether it is this process or one of an arm: a descendant, or marked, like the processes of Ray."""
        parent = self._seen.get(process.ppid())
        if process.pid == os.getpid() or (parent is not None and parent[1]):
            return True
        return _MARKER in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")


def undisturbed(measure: Callable[[], T]) -> T:
    """Return what ``measure`` returns, after it has run without being disturbed by other programs.

    Raises:
        SystemExit: other programs disturbed it three times.
    """

    def attempts() -> Iterator[tuple[T, float, str]]:
        for _ in range(ATTEMPTS):
            with OtherPrograms() as others:
                result = measure()
            yield result, others.share, _largest(others)

    return first_undisturbed(attempts())


def first_undisturbed(attempts: Iterable[tuple[T, float, str]]) -> T:
    """Return the first result that other programs did not disturb.

    Args:
        attempts: Of each attempt its result, the share of the CPUs that other programs used, and the largest of these.

    Raises:
        SystemExit: all attempts were disturbed.
    """
    for result, share, largest in attempts:
        if share <= DISTURBED_FROM:
            return result
        print(f"  disturbed: other programs used {share:.0%} of the CPUs, most of it {largest}", flush=True)
    raise SystemExit(f"given up after {ATTEMPTS} disturbed rounds: end the other programs, or measure later")


def _largest(others: OtherPrograms) -> str:
    pid = max(others.used_s, key=lambda pid: others.used_s[pid], default=0)
    try:
        return f"process {pid} ({' '.join(psutil.Process(pid).cmdline())[:60]})"
    except psutil.Error:
        return f"process {pid}, which has ended"


def _stolen_s() -> float:
    return float(getattr(psutil.cpu_times(), "steal", 0.0))

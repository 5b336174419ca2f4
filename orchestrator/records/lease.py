"""The driver's hold on its run directory: shown to other hosts, and given up when another driver has taken over."""

from __future__ import annotations

import contextlib
import time

from orchestrator.records import run_dir as rundir
from orchestrator.records.run_dir import LEASE_S, RunDir

RENEW_EVERY_S = LEASE_S / 12


class SupersededError(Exception):
    """Another driver continues the run; nothing more may be written to its directory."""


class Lease:
    def __init__(self, run_dir: RunDir):
        self._run_dir = run_dir
        self._me = rundir.this_process()
        self._next = 0.0

    def renew(self) -> None:
        """To be called often; looks at the directory every few seconds.

        Raises:
            SupersededError: the run has another driver, which found the lease run out.
        """
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + RENEW_EVERY_S
        with contextlib.suppress(OSError, ValueError):  # a full disk, say: training goes on
            driver = self._run_dir.read_record().get("driver", self._me)
            if driver != self._me:
                where = f"pid {driver.get('pid')} on {driver.get('host')}"
                raise SupersededError(f"another driver ({where}) continues this run, after this one was not seen")
            self._run_dir.lease_file.touch()

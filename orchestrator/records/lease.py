"""The driver's lease on its run directory: it shows other hosts that the driver lives, and ends when another driver
continues the run."""

from __future__ import annotations

import contextlib
import time

from orchestrator.records.run_dir import LEASE_S, RunDir, this_process

RENEW_EVERY_S = LEASE_S / 12


class SupersededError(Exception):
    """Another driver continues the run; this one must not write to the run directory any more."""


class Lease:
    """The lease of this process on the directory of the run that it drives."""

    def __init__(self, run_dir: RunDir):
        self._run_dir = run_dir
        self._me = this_process()
        self._next = 0.0

    def renew(self) -> None:
        """Renew the lease if it is due, every few seconds; call it often.

        Raises:
            SupersededError: another driver has found the lease expired and continues the run.
        """
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + RENEW_EVERY_S
        with contextlib.suppress(OSError, ValueError):  # for example a full disk: training continues
            driver = self._run_dir.read_record().get("driver", self._me)
            if driver != self._me:
                where = f"pid {driver.get('pid')} on {driver.get('host')}"
                raise SupersededError(f"another driver ({where}) continues this run: this one lost its lease")
            self._run_dir.lease_file.touch()

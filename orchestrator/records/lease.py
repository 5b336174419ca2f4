"""The driver's lease on its run directory: it shows other hosts that the driver lives, and ends when another driver
continues the run."""

from __future__ import annotations

import threading

from orchestrator.records.process import this_process
from orchestrator.records.run_dir import LEASE_S, RunDir, read_json, write_json

RENEW_EVERY_S = LEASE_S / 12
RETRY_EVERY_S = 0.5
"""The interval after an attempt that failed."""
RESTORED_WITHIN_S = 2 * RENEW_EVERY_S
"""The driver of a run restores the fence file within this time, unless the disk fails."""
_END_TIMEOUT_S = 2.0


class SupersededError(Exception):
    """Another driver continues the run; this one must not write to the run directory any more."""


class Lease:
    """The lease of this process on the directory of the run that it drives.

    A thread renews it while in the context, whatever the driver is doing. The thread also restores the fence file (see
    :mod:`orchestrator.state.fence`) whenever that does not hold the token of the present generation: a single failed
    write would otherwise keep the whole generation from saving.
    """

    def __init__(self, run_dir: RunDir):
        self._run_dir = run_dir
        self._me = this_process()
        self._fence: str | None = None
        self._superseded_by: str | None = None
        self._renewing = threading.Lock()
        self._ended = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._work, name="lease", daemon=True)

    def __enter__(self) -> Lease:
        self.renew()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = True
        self._wake.set()
        self._thread.join(_END_TIMEOUT_S)

    def admit(self, token: str) -> None:
        """Let only the generation of ``token`` save, from now on or as soon as the fence file can be written."""
        self._fence = token
        if not self.renew():
            self._wake.set()

    def check(self) -> None:
        """Check that this process still has the lease.

        Raises:
            SupersededError: another driver has found the lease expired and continues the run.
        """
        if self._superseded_by is not None:
            raise SupersededError(f"another driver ({self._superseded_by}) continues this run: this one lost its lease")

    def renew(self) -> bool:
        """Renew the lease and restore the fence file. Return whether everything could be written."""
        with self._renewing:
            try:
                driver = self._run_dir.read_record().get("driver", self._me)
                if driver != self._me:
                    self._superseded_by = f"pid {driver.get('pid')} on {driver.get('host')}"
                    return True
                self._run_dir.lease_file.touch()
                self._restore_fence()
            except (OSError, ValueError):  # for example a full disk: training continues
                return False
            return True

    def _restore_fence(self) -> None:
        if self._fence is None:
            return
        path = self._run_dir.fence_file
        try:
            current = read_json(path).get("generation")
        except ValueError:
            current = None  # damaged
        if current != self._fence:
            write_json(path, {"generation": self._fence})

    def _work(self) -> None:
        wait_s = RENEW_EVERY_S
        while self._superseded_by is None:
            self._wake.wait(wait_s)
            self._wake.clear()
            if self._ended:
                return
            wait_s = RENEW_EVERY_S if self.renew() else RETRY_EVERY_S

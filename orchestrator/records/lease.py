"""The driver's lease on its run directory: it shows other hosts that the driver lives, and ends when another driver
continues the run."""

from __future__ import annotations

import json
import threading
from typing import Any

from orchestrator.records.json_file import read_json, write_json
from orchestrator.records.lock import this_process
from orchestrator.records.run_dir import LEASE_S, RunDir

RENEW_EVERY_S = LEASE_S / 12
RENEW_REMOTE_EVERY_S = LEASE_S / 4
"""The interval on a store, where each renewal is a few requests."""
RETRY_EVERY_S = 0.5
"""The interval after an attempt that failed."""
_END_TIMEOUT_S = 2.0
_ADMIT_TIMEOUT_S = 5.0
"""A generation waits this long for its fence on a store."""


def renew_every_s(run_dir: RunDir) -> float:
    """Return the seconds between two renewals of the lease of a run."""
    return RENEW_EVERY_S if run_dir.remote is None else RENEW_REMOTE_EVERY_S


def restored_within_s(run_dir: RunDir) -> float:
    """Return the seconds in which the driver of a run restores its fence file, unless the disk or the store fails."""
    return 2 * renew_every_s(run_dir)


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
        self._renewed = threading.Event()
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
        if self._run_dir.remote is not None:
            self._renewed.clear()
            self._wake.set()
            self._renewed.wait(_ADMIT_TIMEOUT_S)
        elif not self.renew():
            self._wake.set()

    def check(self) -> None:
        """Check that this process still has the lease.

        Raises:
            SupersededError: another driver has found the lease expired and continues the run.
        """
        if self._superseded_by is not None:
            raise SupersededError(f"another driver ({self._superseded_by}) continues this run: this one lost its lease")

    def is_mine(self) -> bool:
        """Return whether the record of the run says that this process drives it, as far as is known.

        Raises:
            OSError, ValueError: the record cannot be read.
        """
        driver = self._driver()
        if driver != self._me:
            self._superseded_by = f"pid {driver.get('pid')} on {driver.get('host')}"
        return self._superseded_by is None

    def renew(self) -> bool:
        """Renew the lease and restore the fence file. Return whether everything could be written."""
        with self._renewing:
            try:
                if not self.is_mine():
                    return True
                self._run_dir.lease_file.touch()
                if self._run_dir.remote is not None:
                    self._run_dir.remote.write(self._run_dir.lease_file.name, b"lease")
                self._restore_fence()
            except (OSError, ValueError):  # for example a full disk: training continues
                return False
            self._renewed.set()
            return True

    def _driver(self) -> dict[str, Any]:
        remote, record = self._run_dir.remote, self._run_dir.record_file
        try:
            found = self._run_dir.read_record() if remote is None else json.loads(remote.read(record.name))
        except FileNotFoundError:
            found = {}
        return dict(found.get("driver", self._me))

    def _restore_fence(self) -> None:
        if self._fence is None:
            return
        path, remote = self._run_dir.fence_file, self._run_dir.remote
        token = {"generation": self._fence}
        try:
            current = read_json(path) if remote is None else json.loads(remote.read(path.name))
        except (FileNotFoundError, ValueError):
            current = None  # missing or damaged
        if current == token:
            return
        if remote is None:
            write_json(path, token)
        else:
            remote.write(path.name, json.dumps(token).encode())

    def _work(self) -> None:
        every_s = renew_every_s(self._run_dir)
        wait_s = every_s
        while self._superseded_by is None:
            self._wake.wait(wait_s)
            self._wake.clear()
            if self._ended:
                return
            wait_s = every_s if self.renew() else RETRY_EVERY_S

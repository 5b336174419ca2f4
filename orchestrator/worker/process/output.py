"""The output of a worker process, which goes to the log of its rank."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from orchestrator.records.rank_log import PART_BYTES, log_header, newest_part, next_part
from orchestrator.worker.process import crash_reports

CHECK_EVERY_S = 10.0


class Output:
    """Redirects the output of this process, including what C++ code and crashes write.

    A thread looks after the size of the log, because a file system that hangs must delay no thread that answers the
    driver.

    Args:
        masked: returns a stream that masks secrets in what Python code writes. The driver masks the rest when the run
            ends.
        most_bytes: the log continues in another part if it is larger.
        check_every_s: seconds between two looks.
    """

    def __init__(
        self,
        masked: Callable[[TextIO], TextIO],
        *,
        most_bytes: int = PART_BYTES,
        check_every_s: float = CHECK_EVERY_S,
    ):
        self._masked = masked
        self._most_bytes = most_bytes
        self._check_every_s = check_every_s
        self._log: Path | None = None
        self._lock = threading.Lock()

    def redirect(self, log: Path) -> None:
        """Write to ``log`` from now on."""
        with self._lock:
            log.parent.mkdir(parents=True, exist_ok=True)
            _write_to(newest_part(log))
            crash_reports.enable()
            for name, number in (("stdout", 1), ("stderr", 2)):
                stream = os.fdopen(number, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
                setattr(sys, name, self._masked(stream))
            if self._log is None:
                threading.Thread(target=self._limit_parts, name="log-parts", daemon=True).start()
            self._log = log

    def _limit_parts(self) -> None:
        while True:
            time.sleep(self._check_every_s)
            with self._lock, contextlib.suppress(OSError):  # a full disk: the log goes on where it is
                assert self._log is not None
                if os.fstat(2).st_size > self._most_bytes:
                    _write_to(next_part(self._log))


def _write_to(path: Path) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    with path.open("ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.write(2, log_header(os.getpid(), socket.gethostname()).encode())

"""The release of a generation's process groups, for which no outcome waits.

Under NCCL, ``destroy_process_group`` waits for all ranks, and one of them may have failed. If a rank reported its
outcome after that, the driver would see a failure as a hang, and blame a rank that only waits. So the outcome goes out
first, and a thread releases the groups. With gloo, it destroys them if the generation has ended in order on this rank.
Otherwise it aborts their communicators, which waits for nobody.

With NCCL, it always aborts them, because a rank that has ended in order cannot know that its peers have. The word of
the driver comes before any abort. What an aborted rank sends and computes is garbage, so all ranks have to know first
that the generation has ended (see ``driver/run/abandonment.py``). The control thread then aborts the groups at once,
because nothing else frees a rank that waits for a lost one. The beginning of another generation is the word too: the
driver begins it when every rank has ended or is lost. Without a word, a rank that has failed ends its process, which
posts no garbage.

The destructor of a group joins threads of torch, which may be waiting for a device that has failed. So the groups of
NCCL are dropped on a thread that nothing waits for.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable

import torch.distributed as dist

from orchestrator.worker.control import rendezvous

RELEASE_TIMEOUT_S = 30.0


class ReleaseError(RuntimeError):
    """The process groups of an earlier generation are still there, so that this process cannot join another one."""


class Teardown:
    """Releases the process groups of one generation after another.

    Args:
        word_timeout_s: how long a rank that has failed waits for the word of the driver, before it ends its process.
        timeout_s: how long a generation waits for the release of the one before.
    """

    def __init__(self, *, word_timeout_s: float, timeout_s: float = RELEASE_TIMEOUT_S):
        self._word_timeout_s = word_timeout_s
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._generation = 0
        self._frees_waits = False
        self._word = threading.Event()
        self._aborted: list[dist.ProcessGroup] | None = None
        self._thread: threading.Thread | None = None

    @property
    def has_aborted(self) -> bool:
        """Whether :meth:`abort` has ended the groups of the present generation, so that any error may follow."""
        return self._aborted is not None

    def begin(self, generation: int, *, backend: str) -> None:
        """Wait until the groups of the generation before are released; the groups of ``generation`` may then be formed.

        Raises:
            ReleaseError: they were not released in time.
        """
        self._word.set()
        if self._thread is not None:
            self._thread.join(self._timeout_s)
            if self._thread.is_alive():
                raise ReleaseError(
                    f"the process groups of generation {self._generation} were not released within "
                    f"{self._timeout_s:g} s, so this process cannot continue"
                )
        self._thread = None
        with self._lock:
            self._generation, self._frees_waits, self._aborted = generation, backend == "nccl", None
            self._word.clear()

    def abort(self, generation: int) -> None:
        """Abort the groups of ``generation`` or an earlier one, if nothing else would free a rank that waits in them.

        Any thread may call this. gloo frees such a rank itself when the connection to the lost one closes. Errors are
        only printed.
        """
        with self._lock:
            if self._frees_waits and self._generation <= generation and self._aborted is None:
                self._aborted = []
                try:
                    self._aborted = rendezvous.abort()
                except Exception:
                    traceback.print_exc()
                self._word.set()

    def start(self, close: Callable[[], None], *, clean: bool) -> None:
        """Release the groups on a thread of its own. Errors are only printed.

        Args:
            close: releases what refers to the groups.
            clean: whether the generation has ended in order on this rank.
        """
        self._thread = threading.Thread(target=self._release, args=(close, clean), name="teardown", daemon=True)
        self._thread.start()

    def _release(self, close: Callable[[], None], clean: bool) -> None:
        # First, because the groups must not be destroyed by what refers to them: see `abort_process_groups`.
        _attempt(close)
        if not self._frees_waits:
            _attempt(rendezvous.leave if clean else rendezvous.abort)
            return
        if not self._word.wait(None if clean else self._word_timeout_s):
            print(
                f"generation {self._generation} has failed here, and no order to abort it came from the driver within "
                f"{self._word_timeout_s:g} s (cluster.heartbeat_timeout_s); this process exits",
                file=sys.stderr,
                flush=True,
            )
            os._exit(1)
        self.abort(self._generation)
        with self._lock:
            groups, self._aborted = self._aborted or [], []
        threading.Thread(target=groups.clear, name="groups", daemon=True).start()


def _attempt(release: Callable[[], object]) -> None:
    try:
        release()
    except Exception:  # a connection may be broken
        traceback.print_exc()

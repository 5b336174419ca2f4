"""A fence that keeps a replaced worker from saving.

A worker that a network partition cuts off does not learn that the run continues without it. The driver therefore
writes the token of each generation to one file in the run directory, and a worker saves only while that file holds
the token of its own generation. The driver's lease restores the file within seconds whenever it differs, and a worker
waits that long before it gives a checkpoint up.

A worker that finds no such file may not save either: it sees another directory than the driver, or the driver has not
been able to write there yet.

On a store, which has no atomic rename, the worker reads the file just before it writes the manifest of a checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path

from orchestrator.storage.remote import Remote

_POLL_S = 0.5


class FencedError(RuntimeError):
    """A later generation of the run has replaced this process, which may no longer save."""


class Fence:
    """The permission of one worker to save.

    Attributes:
        token: the token of the generation that this worker belongs to. Set it whenever the worker joins a generation.
    """

    def __init__(self, path: Path, token: str = "", *, remote: Remote | None = None, restored_within_s: float = 0.0):
        """
        Args:
            path: the JSON file ``{"generation": <token>}`` that the driver writes.
            token: the initial value of the attribute.
            remote: the directory on a store that has the file instead; None if the file is at ``path``.
            restored_within_s: how long the driver may take to restore a file that is damaged or has another token.
        """
        self._path = path
        self._remote = remote
        self._restored_within_s = restored_within_s
        self.token = token

    def may_save(self) -> bool:
        """Return whether this worker's generation is the current one.

        Waits for the driver to restore the file before it returns False or raises.

        Raises:
            OSError: the file is missing or cannot be read; the text names it.
            ValueError: the file is damaged; the text names it.
        """
        deadline = time.monotonic() + self._restored_within_s
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError, ValueError):
                if self._admits():
                    return True
            time.sleep(_POLL_S)
        return self._admits()

    def _admits(self) -> bool:
        try:
            text = self._path.read_bytes() if self._remote is None else self._remote.read(self._path.name)
            current = json.loads(text)
        except FileNotFoundError as e:
            raise FileNotFoundError(f"{self._path} is missing: without it, no worker may save") from e
        except ValueError as e:
            raise ValueError(f"{self._path} is damaged: {e}") from e
        if not isinstance(current, dict) or "generation" not in current:
            raise ValueError(f"{self._path} is damaged: expected an object with the key generation")
        return bool(current["generation"] == self.token)


def check_fence(fence: Fence | None) -> None:
    """Return if ``fence`` lets this process save, or if there is none.

    Raises:
        FencedError: this process may no longer save.
        OSError, ValueError: see :meth:`Fence.may_save`.
    """
    if fence is not None and not fence.may_save():
        raise FencedError("a later generation of the run has replaced this worker and saves instead of it")

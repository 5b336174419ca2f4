"""A fence that keeps a replaced worker from saving.

A worker that a network partition cuts off does not learn that the run continues without it. The driver therefore
writes the token of each generation to one file in the run directory, and a worker saves only while that file holds
the token of its own generation. The driver's lease restores the file within seconds whenever it differs.

A worker whose run directory has no such file may save: the driver has not been able to write the file yet. No
checkpoint would exist otherwise.

On a store, which has no atomic rename, the worker reads the file just before it writes the manifest of a checkpoint.
"""

from __future__ import annotations

import json
from pathlib import Path

from orchestrator.storage.remote import Remote


class FencedError(RuntimeError):
    """A later generation of the run has replaced this process, which may no longer save."""


class Fence:
    """The permission of one worker to save.

    Attributes:
        token: the token of the generation that this worker belongs to. Set it whenever the worker joins a generation.
    """

    def __init__(self, path: Path, token: str = "", *, remote: Remote | None = None):
        """
        Args:
            path: the JSON file ``{"generation": <token>}`` that the driver writes.
            token: the initial value of the attribute.
            remote: the directory on a store that has the file instead; None if the file is at ``path``.
        """
        self._path = path
        self._remote = remote
        self.token = token

    def may_save(self) -> bool:
        """Return whether this worker's generation is the current one, which it also is if there is no file.

        Raises:
            OSError: the file cannot be read.
            ValueError: the file is damaged; the text names it.
        """
        try:
            text = self._path.read_bytes() if self._remote is None else self._remote.read(self._path.name)
            current = json.loads(text)
        except FileNotFoundError:
            return True
        except ValueError as e:
            raise ValueError(f"{self._path} is damaged: {e}") from e
        if not isinstance(current, dict) or "generation" not in current:
            raise ValueError(f"{self._path} is damaged: expected an object with the key generation")
        return bool(current["generation"] == self.token)

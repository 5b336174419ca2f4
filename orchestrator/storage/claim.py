"""A lock on a store that has neither locks nor atomic renames: objects that claim it, and lists that show them."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Iterator

from orchestrator.storage.remote import Remote

CLAIM_TIMEOUT_S = 30.0
"""Wait this long for the claims of others. Each is held for the time of a few small files."""
ABANDONED_S = 60.0
"""A claim counts as left behind by a dead process after this time, by the clock of the store."""
_POLL_S = 0.2
_CLAIMS = ".claims"


@contextlib.contextmanager
def claimed(remote: Remote, *, timeout_s: float = CLAIM_TIMEOUT_S) -> Iterator[None]:
    """Hold the lock of the directory ``remote`` during the block.

    A process writes its claim and then lists all claims. It has the lock if there is no other one: of two processes,
    the one that writes later sees the claim of the other, as lists of a store are consistent. If both see each other,
    the first in the order of names waits, and the others withdraw and try again.

    Raises:
        TimeoutError: others have held the lock for ``timeout_s`` seconds.
        StorageError: the store cannot be used.
    """
    mine = uuid.uuid4().hex
    claims = remote.child(_CLAIMS)
    deadline = time.monotonic() + timeout_s
    try:
        while True:
            claims.write(mine, b"claim")
            while (others := _others(claims, mine)) and mine < min(others):
                _pause(remote, deadline)
            if not others:
                break
            claims.delete(mine)
            _pause(remote, deadline)
        yield
    finally:
        claims.delete(mine)


def _others(claims: Remote, mine: str) -> list[str]:
    """Return the claims of others that live, after the abandoned ones have been deleted."""
    found = {entry.name: entry.changed_at for entry in claims.list() if not entry.name.startswith(".")}
    now = found.pop(mine, None)
    living = []
    for name, changed_at in found.items():
        if now is not None and changed_at is not None and now - changed_at > ABANDONED_S:
            claims.delete(name)
        else:
            living.append(name)
    return living


def _pause(remote: Remote, deadline: float) -> None:
    if time.monotonic() >= deadline:
        raise TimeoutError(f"output_dir={remote}: another process has kept it claimed")
    time.sleep(_POLL_S)

"""A fork of a process that is connected to Ray, in which no call of Ray could return."""

from __future__ import annotations

import sys

_refused = False


def refuse() -> None:
    """Let calls of Ray fail at once in this process, in place of waiting for threads that do not exist in a fork."""
    global _refused
    _refused = True
    if "ray" not in sys.modules:
        return
    from orchestrator.compat.ray.internals import Internal, find_internal, owner_of

    find_internal(Internal.WORKER).mode = None
    owner, name = owner_of(Internal.STARTS_BY_ITSELF)
    setattr(owner, name, False)


def is_refused() -> bool:
    """Return whether calls of Ray fail in this process."""
    return _refused

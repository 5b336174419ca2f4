"""Processes in which Ray must not be used, because they are forks of one that is connected, or beside a run."""

from __future__ import annotations

import os
import sys

_refused = False


def refuse() -> None:
    """Let calls of Ray fail at once in this process, which must start none.

    In a fork, they would wait for threads that do not exist.
    """
    global _refused
    _refused = True
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
    if "ray" not in sys.modules:
        return
    from orchestrator.compat.ray.internals import Internal, find_internal, owner_of

    find_internal(Internal.WORKER).mode = None
    owner, name = owner_of(Internal.STARTS_BY_ITSELF)
    setattr(owner, name, False)


def is_refused() -> bool:
    """Return whether calls of Ray fail in this process."""
    return _refused

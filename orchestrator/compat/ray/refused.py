"""Processes in which Ray must not be used, because they are forks of one that is connected, or beside a run; and one
in which it may start by itself.
"""

from __future__ import annotations

import os
import sys
from typing import Any

_refused = False
_kept: list[Any] = []
"""What is connected, and whose end would wait for threads, too."""


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

    worker = find_internal(Internal.WORKER)
    worker.mode = None
    worker.set_is_connected(False)
    owner, name = owner_of(Internal.STATE)
    _kept.append(getattr(owner, name))
    setattr(owner, name, type(_kept[-1])())
    owner, name = owner_of(Internal.STARTS_BY_ITSELF)
    setattr(owner, name, False)


def quiet() -> None:
    """Keep what tasks print out of this process, in which a dataset of Ray Data may start a Ray of its own."""
    from orchestrator.compat.ray.internals import Internal, owner_of

    owner, name = owner_of(Internal.LOGS_TO_DRIVER)
    setattr(owner, name, False)


def is_refused() -> bool:
    """Return whether calls of Ray fail in this process."""
    return _refused

"""Calls of the driver to its workers, which never wait for ever."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Hashable, MutableMapping
from typing import Any, TypeVar

import ray
import ray.exceptions

from orchestrator.driver import cluster
from orchestrator.policy.failure import CauseOfDeath

K = TypeVar("K", bound=Hashable)


class GangError(RuntimeError):
    """The workers could not be brought together; the text says why and what to do."""


def check_ray() -> None:
    """Nothing that is asked of a dead Ray would ever end.

    Raises:
        GangError: the Ray that this process started is gone.
    """
    if cluster.has_died():
        raise GangError("Ray's own processes on this machine were ended from outside, or ran out of memory")


def cause_of_death(error: Exception) -> CauseOfDeath:
    """What the error of a pending call says about the end of its worker."""
    if isinstance(error, ray.exceptions.OutOfMemoryError):
        return "out of memory"
    return "node lost" if isinstance(error, ray.exceptions.NodeDiedError) else "unknown"


def all_answers(
    references: list[Any], timeout_s: float, *, poll: Callable[[], None] = lambda: None, advice: str = ""
) -> list[Any]:
    """What all of the pending answers become; ``poll()`` is called now and then, and may raise to give up.

    Raises:
        GangError: not in time, which the ``advice`` is for, or Ray is gone.
        RayError: a worker is gone.
    """
    deadline = time.monotonic() + timeout_s
    waiting = references
    while waiting:
        poll()
        _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=0.5)
        check_ray()
        if waiting and time.monotonic() > deadline:
            late = f"{len(waiting)} of {len(references)} workers did not answer within {timeout_s:g} s"
            raise GangError(late + (advice and f"; {advice}"))
    return ray.get(references)


def in_time(asked: MutableMapping[Any, K], timeout_s: float) -> dict[K, Any]:
    """What each pending answer becomes within this time, under its key; those that fail or do not come left out.

    ``asked`` keeps those that have not come.
    """
    ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=timeout_s) if asked else ([], [])
    answers: dict[K, Any] = {}
    for reference in ready:
        key = asked.pop(reference)
        with contextlib.suppress(ray.exceptions.RayError):
            answers[key] = ray.get(reference)
    return answers

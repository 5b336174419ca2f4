"""Calls from the driver to its workers, each with a timeout."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Hashable, MutableMapping
from typing import Any, TypeVar

import ray
import ray.exceptions

from orchestrator.compat.ray import own_ray_has_died
from orchestrator.policy.failure import CauseOfDeath

K = TypeVar("K", bound=Hashable)


class GangError(RuntimeError):
    """The workers cannot be started or reached; the message says why and what to do."""


def check_ray() -> None:
    """Check that the Ray that this process started lives; no call to a dead one would return.

    Raises:
        GangError: it is dead.
    """
    if own_ray_has_died():
        raise GangError("Ray's processes on this machine were killed, or ran out of memory; start the run again")


def cause_of_death(error: Exception) -> CauseOfDeath:
    """Return what the error of a pending call says about the death of its worker."""
    if isinstance(error, ray.exceptions.OutOfMemoryError):
        return "out of memory"
    return "node lost" if isinstance(error, ray.exceptions.NodeDiedError) else "unknown"


def all_answers(
    references: list[Any], timeout_s: float, *, check: Callable[[], None] | None = None, advice: str = ""
) -> list[Any]:
    """Wait for all pending answers and return them in order.

    ``check()`` is called twice a second, and may raise to stop waiting.

    Raises:
        GangError: some answers did not come within ``timeout_s``, for which ``advice`` says what to do; or Ray is dead.
        RayError: a worker is dead.
    """
    deadline = time.monotonic() + timeout_s
    pending = references
    while pending:
        if check is not None:
            check()
        _, pending = ray.wait(pending, num_returns=len(pending), timeout=0.5)
        check_ray()
        if pending and time.monotonic() > deadline:
            late = f"{len(pending)} of {len(references)} workers did not answer within {timeout_s:g} s"
            raise GangError(late + (advice and f"; {advice}"))
    return ray.get(references)


def completed(pending: Collection[Any], timeout_s: float) -> list[Any]:
    """Wait up to ``timeout_s`` for the first of some pending calls, and return all that have completed by then."""
    references = list(pending)
    ready, rest = ray.wait(references, num_returns=1, timeout=timeout_s)
    if ready and rest:
        ready += ray.wait(rest, num_returns=len(rest), timeout=0)[0]
    return ready


def answers_in_time(pending: MutableMapping[Any, K], timeout_s: float) -> dict[K, Any]:
    """Return the answers that come within ``timeout_s``, under their keys; calls that fail are left out.

    The calls that were answered, or failed, are removed from ``pending``.
    """
    ready, _ = ray.wait(list(pending), num_returns=len(pending), timeout=timeout_s) if pending else ([], [])
    answers: dict[K, Any] = {}
    for reference in ready:
        key = pending.pop(reference)
        with contextlib.suppress(ray.exceptions.RayError):
            answers[key] = ray.get(reference)
    return answers

"""Calls from the driver to its workers, each with a timeout, and the watch on the head of their cluster."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterator, MutableMapping, Sequence
from typing import Any, TypeVar

import ray
import ray.exceptions

from orchestrator.compat.ray.connection import RECONNECT_TIMEOUT, own_ray_has_died, probe_gcs, reconnect_timeout_s
from orchestrator.compat.ray.gcs import died_with_node
from orchestrator.policy.failure import CauseOfDeath

LOST_AFTER = 0.8
"""The part of Ray's own timeout after which the head counts as lost: at its end, the nodes kill the workers."""
_PROBE_EVERY_S, _PROBES = 5.0, 8
_PROBE_TIMEOUT_S = 5.0
_JOIN_TIMEOUT_S = 1.0
_NO_ANSWER = ("unavailable", "deadline_exceeded")

_watches: list[HeadWatch] = []


class HeadWatch:
    """Asks the GCS server at ``address`` every few seconds whether it lives. Use as a context manager.

    Args:
        timeout_s: how long it may give no answer.
    """

    def __init__(self, address: str, timeout_s: float):
        self._address = address
        self._timeout_s = timeout_s
        self._silent_s = 0.0
        self._closed = threading.Event()
        # A thread of its own: the other ones may wait for the server.
        self._thread = threading.Thread(target=self._work, name="head-watch", daemon=True)

    def __enter__(self) -> HeadWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join(_JOIN_TIMEOUT_S)

    def why_lost(self) -> str | None:
        """Return that the server has not answered for too long, as a sentence; None if it has."""
        if self._silent_s < self._timeout_s:
            return None
        return (
            f"the head of the Ray cluster ({self._address}) has not answered for {self._silent_s:.0f} s, and the nodes "
            f"end after {reconnect_timeout_s():g} s ({RECONNECT_TIMEOUT}); start the cluster again, and resume the run"
        )

    def _work(self) -> None:
        silent_since: float | None = None  # counted from a missing answer, because this process may have been stopped
        while not self._closed.wait(min(_PROBE_EVERY_S, self._timeout_s / _PROBES)):
            asked_at = time.monotonic()
            if probe_gcs(self._address, timeout_s=_PROBE_TIMEOUT_S) not in _NO_ANSWER:
                silent_since, self._silent_s = None, 0.0
                continue
            silent_since = asked_at if silent_since is None else silent_since
            self._silent_s = time.monotonic() - silent_since


@contextlib.contextmanager
def watched_head(address: str) -> Iterator[None]:
    """Watch the head of the cluster whose GCS server is at ``address``, for :func:`why_head_lost`."""
    with HeadWatch(address, LOST_AFTER * reconnect_timeout_s()) as watch:
        _watches.append(watch)
        try:
            yield
        finally:
            _watches.remove(watch)


def why_head_lost() -> str | None:
    """Return that the head of the cluster is lost, as a sentence; None if it is not, or is not watched."""
    return next((why for watch in _watches if (why := watch.why_lost()) is not None), None)


GATHER_S = 0.05
"""After one of many calls, wait this long for more of them, because each wait examines all that are pending."""
CHECK_EVERY_S = 0.5
"""The interval at which a wait for answers checks whether to stop."""

K = TypeVar("K", bound=Hashable)


class GangError(RuntimeError):
    """The workers cannot be started or reached; the message says why and what to do."""


class NoWorkersError(GangError):
    """There is no room for new workers, or each one dies as it starts."""


class UnfitError(NoWorkersError):
    """The cluster has become too small for the run."""


class NoAnswerError(GangError):
    """Some workers did not answer in time."""


def check_ray() -> None:
    """Check that the Ray of this process lives: the one that it started, or the head of the one that it joined.

    No call to a dead one would return.

    Raises:
        GangError: it is dead.
    """
    if own_ray_has_died():
        raise GangError("Ray's processes on this machine were killed, or ran out of memory; start the run again")
    if (why := why_head_lost()) is not None:
        raise GangError(why)


def cause_of_death(error: ray.exceptions.RayError) -> CauseOfDeath | None:
    """Return what the error of a call says about the death of its worker; None if the worker lives."""
    match error:
        case ray.exceptions.RayTaskError() | ray.exceptions.RaySystemError():  # raised by the call, or by its transport
            return None
        case ray.exceptions.OutOfMemoryError():
            return "out of memory"
    return "node lost" if died_with_node(error) else "unknown"


def describe_error(error: ray.exceptions.RayError) -> str:
    """Return the type and the message of what made a call fail, in one line."""
    if isinstance(error, ray.exceptions.RayTaskError):
        lines = str(error.cause).strip().splitlines()
        return f"{type(error.cause).__name__}: {lines[0] if lines else 'no message'}"
    return f"{type(error).__name__}: {str(error).strip().splitlines()[-1].strip()}"  # the end of a traceback


def all_answers(references: list[Any], timeout_s: float, *, check: Callable[[], None] | None = None) -> list[Any]:
    """Wait for all pending answers and return them in order.

    ``check()`` is called twice a second, and may raise to stop waiting.

    Raises:
        NoAnswerError: some answers did not come within ``timeout_s``.
        GangError: Ray is dead.
        RayError: a worker is dead, or could not carry out the call.
    """
    deadline = time.monotonic() + timeout_s
    pending = references
    while pending:
        if check is not None:
            check()
        _, pending = _wait_for_all(pending, CHECK_EVERY_S)
        check_ray()
        if pending and time.monotonic() > deadline:
            raise NoAnswerError(f"{len(pending)} of {len(references)} workers did not answer within {timeout_s:g} s")
    return ray.get(references)


def completed(pending: Collection[Any], timeout_s: float, *, gather_s: float = 0.0) -> list[Any]:
    """Wait up to ``timeout_s`` for the first of some pending calls, and ``gather_s`` more for the others.

    Returns:
        All that have completed by then.
    """
    references = list(pending)
    # Ray rounds down to whole milliseconds, so a caller that waits until a given time would have to call several times.
    ready, rest = ray.wait(references, num_returns=1, timeout=timeout_s + 1e-3)
    if ready and rest:
        ready += ray.wait(rest, num_returns=len(rest), timeout=gather_s)[0]
    return ready


def results(references: Sequence[Any]) -> list[Any]:
    """Return the results of completed calls in order; the result of a call that has failed is its error."""
    try:
        return ray.get(list(references))
    except ray.exceptions.RayError:
        return [_result(reference) for reference in references]


def _result(reference: Any) -> Any:
    try:
        return ray.get(reference)
    except ray.exceptions.RayError as e:
        return e


def answers_in_time(
    pending: MutableMapping[Any, K],
    timeout_s: float,
    *,
    check: Callable[[], None] | None = None,
    errors: MutableMapping[K, ray.exceptions.RayError] | None = None,
) -> dict[K, Any]:
    """Return the answers that come within ``timeout_s``, under their keys; calls that fail are left out.

    Args:
        pending: the calls. Those that were answered, or failed, are removed from it.
        timeout_s: how long to wait for all of them.
        check: called twice a second, and may raise to stop waiting.
        errors: receives the errors of the calls that fail.
    """
    deadline = time.monotonic() + timeout_s
    ready, rest = _wait_for_all(pending, timeout_s if check is None else min(timeout_s, CHECK_EVERY_S))
    while rest and check is not None and (left_s := deadline - time.monotonic()) > 0:
        check()
        ready, rest = _wait_for_all(pending, min(left_s, CHECK_EVERY_S))
    keys = [pending.pop(reference) for reference in ready]
    answers: dict[K, Any] = {}
    for key, result in zip(keys, results(ready), strict=True):
        if not isinstance(result, ray.exceptions.RayError):
            answers[key] = result
        elif errors is not None:
            errors[key] = result
    return answers


def _wait_for_all(pending: Collection[Any], timeout_s: float) -> tuple[list[Any], list[Any]]:
    """Return the pending calls that have completed within ``timeout_s``, and the others."""
    return ray.wait(list(pending), num_returns=len(pending), timeout=timeout_s) if pending else ([], [])

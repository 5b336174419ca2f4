"""The wait for actors that Ray has placed: their node first gets the code and packages of the run."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

import ray
import ray.exceptions

from orchestrator.driver.process.calls import GangError, check_ray, completed, describe_error
from orchestrator.driver.process.waiting import MESSAGE_EVERY_S, WaitMonitor
from orchestrator.protocol.messages import WorkerInfo
from orchestrator.worker.process.packages import InstallError

_POLL_S = 0.5


def wait_for_actors(
    starting: Mapping[Any, str], *, timeout_s: float, pip: Sequence[str], monitor: WaitMonitor
) -> list[WorkerInfo]:
    """Wait until all actors are up, and report meanwhile what is missing.

    Args:
        starting: the name of the node of each actor, by the reference to its :class:`WorkerInfo`.
        timeout_s: how long to wait.
        pip: the requirements that the actors install first.
        monitor: checked several times a second.

    Returns:
        What the actors say about themselves, in order.

    Raises:
        GangError: an actor died, or is not up in time; or Ray is dead.
        Interrupted, SupersededError: see :meth:`WaitMonitor.check`.
    """
    began = reported_at = time.monotonic()
    pending = dict(starting)
    while pending:
        for reference in completed(pending, _POLL_S):
            _check_started(reference, host=pending.pop(reference))
        check_ray()
        monitor.check()
        now = time.monotonic()
        what = _awaited(len(pending), len(starting), sorted(set(pending.values())), pip)
        if pending and now - began > timeout_s:
            raise GangError(
                f"no {what} within {timeout_s:.0f} s; see Ray's logs there, or raise cluster.start_timeout_s"
            )
        if pending and now - reported_at > MESSAGE_EVERY_S:
            reported_at = now
            monitor.report(now - began, what)
    return [cast(WorkerInfo, info) for info in ray.get(list(starting))]


def start_failure(error: ray.exceptions.RayError, *, host: str) -> str:
    """Return why an actor did not start on ``host``, in one line."""
    what = describe_error(error)
    if isinstance(error, ray.exceptions.RuntimeEnvSetupError):
        return f"Ray cannot bring the code of the run to {host}: {what}"
    _, raised_by_pip, why = what.partition(f"{InstallError.__name__}: ")
    return why if raised_by_pip else f"a worker died on {host} while it started: {what}"


def _check_started(reference: Any, *, host: str) -> None:
    try:
        ray.get(reference)
    except ray.exceptions.RayError as e:
        raise GangError(start_failure(e, host=host)) from e


def _awaited(missing: int, total: int, hosts: Sequence[str], pip: Sequence[str]) -> str:
    names = [line.split()[0] for line in pip if not line.startswith("-")]  # options and URLs may hold secrets
    installs = f", where pip installs {' and '.join(names)}" if names else ""
    return f"start of {missing} of {total} workers on {' and '.join(hosts)}{installs}"

"""The start of Ray's processes while a command imports torch, composes its configuration and checks it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.config.files import Files
from orchestrator.config.overrides import values
from orchestrator.records.sweep_dir import membership

_DECIDE_LATER = ("plan", "debug", "experiment", "cluster.address", "cluster.dashboard")
"""Keys that may make a run embed no Ray, or another one."""


def early_start(overrides: Sequence[str]) -> contextlib.AbstractContextManager[None]:
    """Start the processes of the Ray that a run with ``overrides`` will embed; see :func:`cluster.started_early`."""
    given = values(overrides)
    if Files.of(overrides).may_set_any(given) or not embeds_ray(given, os.environ) or membership() is not None:
        return contextlib.nullcontext()
    from orchestrator.driver.process.cluster import started_early

    return started_early(num_workers(given, cores=len(os.sched_getaffinity(0))))


def embeds_ray(given: Mapping[str, Any], environment: Mapping[str, str]) -> bool:
    """Return whether a run with the overrides ``given`` certainly embeds a Ray, unless its configuration is refused."""
    if given.keys() & set(_DECIDE_LATER):
        return False
    match given.get("cluster", "default"):
        case "local":
            return True
        case "default":
            return environment.get("RAY_ADDRESS") in (None, "", "local")
    return False


def num_workers(given: Mapping[str, Any], *, cores: int) -> int:
    """Return how many processes of workers such a run certainly has, as far as there are ``cores``."""
    number = given.get("strategy.num_workers", 1)
    known = isinstance(number, int) and given.get("strategy") not in ("auto", "single")
    return max(1, min(number, cores)) if known else 1

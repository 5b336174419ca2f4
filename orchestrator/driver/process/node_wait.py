"""Wait for answers of nodes and report which are missing: a busy machine may need minutes to start a process."""

from __future__ import annotations

import sys
import time
from collections.abc import MutableMapping
from typing import Any

import ray
import ray.exceptions

from orchestrator.config.text import first_few
from orchestrator.driver.process.calls import answers_in_time
from orchestrator.planning.plan import Node

FIRST_MESSAGE_S, MESSAGE_EVERY_S = 5.0, 10.0
_MAX_LISTED = 4


def node_answers(
    pending: MutableMapping[Any, Node],
    timeout_s: float,
    *,
    wanted: str,
    errors: MutableMapping[Node, ray.exceptions.RayError] | None = None,
) -> dict[Node, Any]:
    """Return the answers that come within ``timeout_s``; prints to stderr, every few seconds, which ones are missing.

    Args:
        pending: the calls, as for :func:`~orchestrator.driver.process.calls.answers_in_time`.
        timeout_s: how long to wait for all of them.
        wanted: what the nodes are asked for.
        errors: receives the errors of the calls that fail.
    """
    began = time.monotonic()
    report_at = began + FIRST_MESSAGE_S

    def report() -> None:
        nonlocal report_at
        if (now := time.monotonic()) < report_at:
            return
        report_at = now + MESSAGE_EVERY_S
        _, missing = ray.wait(list(pending), num_returns=len(pending), timeout=0)
        places = first_few([pending[call].place for call in missing], _MAX_LISTED)
        text = f"waiting {now - began:.0f}s for {wanted} of {places}: a process has to start there"
        print(text, file=sys.stderr, flush=True)

    return answers_in_time(pending, timeout_s, check=report, errors=errors)

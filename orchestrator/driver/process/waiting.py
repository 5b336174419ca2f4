"""Waits for Ray and for nodes that also check for signals and the lease, and report progress and who holds the rest."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import ray
import ray.exceptions

from orchestrator.compat.ray.gcs import all_nodes, free_resources, placed_actors, placed_bundles
from orchestrator.config.operation import ClusterConfig
from orchestrator.config.text import first_few
from orchestrator.driver.process.calls import NoWorkersError, UnfitError, answers_in_time, check_ray
from orchestrator.driver.process.run_context import EventStream
from orchestrator.driver.process.signals import StopSignals
from orchestrator.planning.plan import Node
from orchestrator.policy.shortage import ClusterState, Holding, NodeState, Request, can_ever_fit, explain
from orchestrator.protocol.events import WaitingForResources
from orchestrator.records.lease import Lease

FIRST_MESSAGE_S, MESSAGE_EVERY_S = 2.0, 5.0
_FIRST_NODE_MESSAGE_S, _NODE_MESSAGE_EVERY_S = 5.0, 10.0
_MAX_LISTED = 4


class Interrupted(Exception):
    """SIGINT or SIGTERM came while no step was running."""


class TurnLostError(Exception):
    """Another run goes first; this one must release what it has reserved, and wait again."""


class WaitMonitor:
    """The driver's duties while it waits for workers that do not train yet.

    Args:
        check_turn: see :class:`~orchestrator.driver.process.turns.Turns`.
        offer_turn: see there.
    """

    def __init__(
        self,
        events: EventStream,
        lease: Lease,
        stop: StopSignals,
        *,
        check_turn: Callable[[], None] = lambda: None,
        offer_turn: Callable[[], None] = lambda: None,
    ):
        self._events = events
        self._lease = lease
        self._stop = stop
        self._check_turn = check_turn
        self.offer_turn = offer_turn
        self._grace_s = 0.0

    def check(self) -> None:
        """Decide whether to wait longer. To be called several times a second.

        Raises:
            Interrupted: a stop has been requested, and the grace period has passed.
            SupersededError: another driver has taken over the run.
            TurnLostError: another run goes first.
        """
        self._lease.check()
        self._check_turn()
        if self._stop.received is not None and self._stop.seconds_ago >= self._grace_s:
            raise Interrupted

    @contextlib.contextmanager
    def grace(self, seconds: float) -> Iterator[None]:
        """Let the waits in this context go on for ``seconds`` after the request to stop."""
        self._grace_s = seconds
        try:
            yield
        finally:
            self._grace_s = 0.0

    def warn(self, message: str) -> None:
        """Warn the user."""
        self._events.warn(message)

    def report(self, waited_s: float, wanted: str, why: str = "") -> None:
        """Report what the run waits for, and why; empty if that is not known."""
        self._events.emit(WaitingForResources(waited_s=waited_s, wanted=wanted, why=why))


class UnfitLimit:
    """Ends the wait for a cluster that has become too small for a run.

    Args:
        timeout_s: how long the cluster may be too small; None for no limit.
    """

    def __init__(self, timeout_s: float | None):
        self._timeout_s = timeout_s
        self._since: float | None = None

    def check(self, is_unfit: bool, why: Callable[[], str]) -> None:
        """Take note of whether the cluster is too small; ``why()`` returns what the run needs, and what there is.

        Raises:
            UnfitError: it has been so for the timeout.
        """
        if not is_unfit or self._timeout_s is None:
            self._since = None
            return
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        if now - self._since > self._timeout_s:
            raise UnfitError(
                f"the cluster has been too small for {now - self._since:.0f} s (cluster.unfit_timeout_s): {why()}"
            )


class ResourceWait:
    """One wait for room in the cluster: reports every few seconds, and gives up after ``cluster.pending_timeout_s``.

    Args:
        wanted: names what is waited for.
        request: what would suffice.
        label: the beginning of the names of the run's own placement groups.
        trouble: returns why nothing can be placed on some nodes, by node id.
        unfit_timeout_s: give up earlier if the cluster is too small for so long; None not to.
    """

    def __init__(
        self,
        wanted: str,
        request: Request,
        config: ClusterConfig,
        monitor: WaitMonitor,
        *,
        label: str,
        trouble: Callable[[], Mapping[str, str]],
        unfit_timeout_s: float | None = None,
    ):
        self._wanted = wanted
        self._request = request
        self._config = config
        self._monitor = monitor
        self._label = label
        self._trouble = trouble
        self._unfit = UnfitLimit(unfit_timeout_s)
        self._began = time.monotonic()
        self._report_at = self._began + FIRST_MESSAGE_S

    @property
    def waited_s(self) -> float:
        """The time since the wait began, in seconds."""
        return time.monotonic() - self._began

    def check(self) -> None:
        """Decide whether to wait longer. To be called several times a second.

        Raises:
            NoWorkersError: the timeout has passed.
            UnfitError: the cluster has been too small for too long.
            GangError: Ray is dead.
            Interrupted, SupersededError: see :meth:`WaitMonitor.check`.
        """
        self._monitor.check()
        check_ray()
        if self.waited_s > self._config.pending_timeout_s:
            raise NoWorkersError(
                f"no room for {self._wanted} within {self.waited_s:.0f} s: {self._explain(self.state())}; free some, "
                "lower strategy.num_workers, or raise cluster.pending_timeout_s"
            )
        if time.monotonic() > self._report_at:
            self._report_at = time.monotonic() + MESSAGE_EVERY_S
            state = self.state()
            why = self._explain(state)
            self._monitor.report(self.waited_s, self._wanted, why)
            is_unfit = not self._config.autoscaling and not can_ever_fit(self._request, state)
            self._unfit.check(is_unfit, lambda: why)

    def state(self) -> ClusterState:
        """Return the present state of the cluster."""
        return cluster_state(own_label=self._label, trouble=self._trouble())

    def _explain(self, state: ClusterState) -> str:
        return explain(self._request, state, autoscaling=self._config.autoscaling, now=time.time())


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
    report_at = began + _FIRST_NODE_MESSAGE_S

    def report() -> None:
        nonlocal report_at
        if (now := time.monotonic()) < report_at:
            return
        report_at = now + _NODE_MESSAGE_EVERY_S
        _, missing = ray.wait(list(pending), num_returns=len(pending), timeout=0)
        places = first_few([pending[call].place for call in missing], _MAX_LISTED)
        text = f"waiting {now - began:.0f}s for {wanted} of {places}: a process has to start there"
        print(text, file=sys.stderr, flush=True)

    return answers_in_time(pending, timeout_s, check=report, errors=errors)


_OF_RUN = re.compile(r"(?P<run>.+)/\d+")
"""The name that :class:`~orchestrator.driver.gang.slots.Slots` gives a placement group."""


def cluster_state(*, own_label: str = "", trouble: Mapping[str, str] | None = None) -> ClusterState:
    """Return the state of the living nodes.

    Args:
        own_label: begins the names of this run's own placement groups; empty if it has none.
        trouble: why nothing can be placed on some nodes, by node id; None if nothing is known about that.
    """
    free = free_resources()
    nodes = [
        NodeState(
            node_id=(node_id := n.node_id.hex()),
            name=n.node_manager_hostname,
            address=n.node_manager_address,
            total=dict(n.resources_total),
            free=free.get(node_id, {}),
            trouble=(trouble or {}).get(node_id, ""),
        )
        for n in all_nodes()
        if n.state == n.ALIVE
    ]
    holdings = [
        Holding(
            node_id=bundle.node_id,
            holder=_holder(bundle.group, own_label),
            resources=bundle.resources,
            since=bundle.placed_at,
        )
        for bundle in placed_bundles()
    ]
    holdings += [
        Holding(
            node_id=actor.node_id,
            holder=f"Ray job {actor.job}",
            resources=actor.resources,
            since=actor.started_at,
        )
        for actor in placed_actors()
    ]
    return ClusterState(nodes=nodes, holdings=holdings)


def _holder(group: str, own_label: str) -> str:
    """Return who has reserved the placement group with this name, as shown to users."""
    if (match := _OF_RUN.fullmatch(group)) is None:
        return f"placement group {group}" if group else "an unnamed placement group"
    return "this run" if match["run"] == own_label else f"run {match['run']}"

"""Waits for Ray that also check for signals and the lease, and report progress."""

from __future__ import annotations

import time

from ray.util.placement_group import placement_group_table

from orchestrator.driver.calls import GangError
from orchestrator.driver.event_stream import EventStream
from orchestrator.driver.signals import StopSignals
from orchestrator.planning.plan import Plan
from orchestrator.protocol.events import WaitingForResources
from orchestrator.records.lease import Lease

MESSAGE_EVERY_S = 5.0


class Interrupted(Exception):
    """SIGINT or SIGTERM came while no step was running."""


class WaitMonitor:
    """The driver's duties while it waits for workers that do not train yet.

    ``grace_s``: the seconds that a wait continues after a stop request.
    """

    def __init__(self, events: EventStream, lease: Lease, stop: StopSignals):
        self._events = events
        self._lease = lease
        self._stop = stop
        self.grace_s = 0.0

    def check(self) -> None:
        """Decide whether to wait longer. To be called several times a second.

        Raises:
            Interrupted: a stop has been requested, and the grace period has passed.
            SupersededError: another driver has taken over the run.
        """
        self._lease.check()
        if self._stop.received is not None and self._stop.seconds_ago >= self.grace_s:
            raise Interrupted

    def warn(self, message: str) -> None:
        """Warn the user."""
        self._events.warn(message)

    def report(self, waited_s: float, plan: Plan, holders: str) -> None:
        """Report what the run waits for, and who holds resources."""
        wanted = f"{plan.world_size + plan.spares} x {plan.cpus_per_worker:g} CPU"
        if plan.gpus_per_worker:
            wanted += f" and {plan.gpus_per_worker} GPU"
        self._events.emit(WaitingForResources(waited_s=waited_s, wanted=wanted, holders=holders))

    def report_start(self, waited_s: float, wanted: str) -> None:
        """Report which workers have not started yet on the resources that they have."""
        self._events.emit(WaitingForResources(waited_s=waited_s, wanted=wanted, holders=""))


class ResourceWait:
    """One wait for resources: reports every few seconds, and gives up after ``timeout_s``.

    ``what`` names the resources in the error message. ``label`` begins the names of the run's own placement groups.
    """

    def __init__(self, what: str, plan: Plan, *, label: str, timeout_s: float, monitor: WaitMonitor):
        self._what = what
        self._plan = plan
        self._label = label
        self._timeout_s = timeout_s
        self._monitor = monitor
        self._began = self._reported_at = time.monotonic()

    def check(self) -> None:
        """Decide whether to wait longer. To be called several times a second.

        Raises:
            GangError: the timeout has passed.
            Interrupted, SupersededError: see :meth:`WaitMonitor.check`.
        """
        self._monitor.check()
        now = time.monotonic()
        waited_s = now - self._began
        if waited_s > self._timeout_s:
            raise GangError(
                f"no room for {self._what} within {waited_s:.0f} s (held by {_holders(self._label)}); free "
                "some, lower strategy.num_workers, or raise cluster.pending_timeout_s"
            )
        if now - self._reported_at > MESSAGE_EVERY_S:
            self._reported_at = now
            self._monitor.report(waited_s, self._plan, _holders(self._label))


def _holders(label: str) -> str:
    """The placement groups of other runs that hold resources."""
    others = [
        f"{group['name'] or 'unnamed'} ({len(group['bundles'])} bundles)"
        for group in placement_group_table().values()
        if group["state"] == "CREATED" and not group["name"].startswith(f"{label}/")
    ]
    return ", ".join(others) or "other Ray tasks"

"""The nodes on which the workers of a run may start: each is asked once, whenever it joins the cluster."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Set
from typing import Any

import ray

from orchestrator.compat.ray.connection import is_own_ray
from orchestrator.driver.code.worker_code import WorkerCode
from orchestrator.driver.nodes.node_reports import ask_nodes, driver_report, reports_in_time
from orchestrator.driver.nodes.node_watch import NodeWatch
from orchestrator.driver.process import cluster
from orchestrator.driver.process.calls import check_ray
from orchestrator.driver.process.run_context import RunSpec
from orchestrator.driver.process.waiting import WaitMonitor
from orchestrator.planning.plan import Node
from orchestrator.policy.node_check import check_sharing, differences, fault_lines
from orchestrator.protocol.node_report import NodeReport, NoReport

POLL_S = 0.1


class Admission:
    """Admits nodes to a run, or refuses them with a warning that names the fault and its remedy.

    The nodes that were checked before the run are admitted. Ray must be connected.
    """

    def __init__(self, spec: RunSpec, code: WorkerCode, nodes: NodeWatch, monitor: WaitMonitor):
        self._spec = spec
        self._config = spec.config.cluster
        self._code = code
        self._nodes = nodes
        self._monitor = monitor
        self._admitted = set(spec.checked_nodes)
        if is_own_ray():
            self._admitted.add(ray.get_runtime_context().get_node_id())
        self._refused: dict[str, str] = {}  # by node id: why
        self._pending: dict[Any, Node] = {}  # by pending report
        self._asked_at: dict[str, float] = {}  # by node id
        self._late: set[str] = set()  # node ids

    def trouble(self) -> Mapping[str, str]:
        """Return why no worker should start on some nodes, by node id."""
        excluded = cluster.excluded_nodes(self._config.exclude_nodes)
        return {
            **self._nodes.trouble(),
            **dict.fromkeys(excluded, "is left out by cluster.exclude_nodes"),
            **dict.fromkeys(self._late, "does not answer"),
            **self._refused,
        }

    def has_changed(self, avoided: Set[str]) -> bool:
        """Return whether the nodes with trouble are others than those in ``avoided``, by the reports until now."""
        self._collect_reports()
        return self.trouble().keys() != avoided

    def admits(self, node_id: str) -> bool | None:
        """Return whether workers may start on the node; None until it has reported. Asks it at the first call."""
        self._collect_reports()
        if node_id in self._admitted:
            return True
        if node_id in self.trouble():
            return False
        if node_id not in self._asked_at:
            self._ask(node_id)
        return None

    def admits_all(self, node_ids: Collection[str]) -> bool:
        """Wait until all of the nodes have reported, and return whether workers may start on each of them.

        Raises:
            GangError: Ray is dead.
            Interrupted, SupersededError, TurnLostError: see :meth:`WaitMonitor.check`.
        """
        while None in (answers := {self.admits(node_id) for node_id in node_ids}):
            self._monitor.check()
            check_ray()
            time.sleep(POLL_S)
        return False not in answers

    def _ask(self, node_id: str) -> None:
        if (node := _living(node_id)) is None:
            self._nodes.lost.add(node_id)
            return
        config, run_dir = self._spec.config, self._spec.run_dir
        self._asked_at[node_id] = time.monotonic()
        self._pending |= ask_nodes(
            [node],
            job_modules=sorted(config.modules(with_job=self._spec.pickled_job is None)),
            code=self._code,
            output_dir=str(run_dir.path) if run_dir.remote is None else None,
            nonce=run_dir.record_file.name,
        )

    def _collect_reports(self) -> None:
        for node, report in reports_in_time(self._pending, 0.0).items():
            self._late.discard(node.node_id)
            self._decide(node, report)
        timeout_s = self._config.rendezvous_timeout_s
        for node in self._pending.values():
            if node.node_id not in self._late and time.monotonic() - self._asked_at[node.node_id] > timeout_s:
                self._late.add(node.node_id)
                self._monitor.warn(
                    f"{node.place} has not answered for {timeout_s:g} s (cluster.rendezvous_timeout_s); no worker "
                    "starts there until it does"
                )

    def _decide(self, node: Node, report: NodeReport | NoReport) -> None:
        faults = list(differences(report, driver_report()))
        if isinstance(report, NodeReport):
            faults += check_sharing(report, self._spec.config.output_dir)
        if not faults:
            self._admitted.add(node.node_id)
        elif _living(node.node_id) is None:
            self._nodes.lost.add(node.node_id)
        else:
            self._refused[node.node_id] = f"is left out: {'; '.join(fault.text for fault in faults)}"
            self._monitor.warn(f"a node is left out until Ray is restarted there: {'; '.join(fault_lines(faults))}")


def _living(node_id: str) -> Node | None:
    return next((node for node in cluster.nodes() if node.node_id == node_id), None)

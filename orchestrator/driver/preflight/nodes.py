"""The check of the nodes of a cluster before a worker starts on any of them."""

from __future__ import annotations

from collections.abc import Sequence

import ray

from orchestrator.config.build import ConfigError
from orchestrator.driver import cluster
from orchestrator.driver.candidates import Candidate
from orchestrator.driver.node_reports import driver_report, node_reports
from orchestrator.driver.worker_code import WorkerCode
from orchestrator.planning.plan import Node
from orchestrator.policy.node_check import node_errors


def fit_nodes(nodes: tuple[Node, ...], candidates: Sequence[Candidate], code: WorkerCode) -> tuple[Node, ...]:
    """Ask each node on which a worker may start whether it can run the jobs with ``code``.

    This machine is not asked if workers may start on it alone.

    Returns:
        The nodes without those that Ray has found dead meanwhile.

    Raises:
        ConfigError: some nodes cannot, or do not answer within ``cluster.rendezvous_timeout_s``.
    """
    config = candidates[0].config.cluster
    asked = [node for node in nodes if node.cpus >= config.cpus_per_worker]
    if {node.node_id for node in asked} <= {ray.get_runtime_context().get_node_id()}:
        return nodes
    modules = {c.config.job_module for c in candidates if c.given is None}
    reports = node_reports(asked, timeout_s=config.rendezvous_timeout_s, job_modules=sorted(modules), code=code)
    alive = {node.node_id for node in cluster.nodes()}
    of_living = [report for node, report in zip(asked, reports, strict=True) if node.node_id in alive]
    if errors := node_errors(of_living, driver_report()):
        raise ConfigError(errors)
    return tuple(node for node in nodes if node.node_id in alive)

"""The check of the nodes of a cluster before a worker starts on any of them."""

from __future__ import annotations

from collections.abc import Sequence

import ray

from orchestrator.config.build import ConfigError
from orchestrator.driver.candidates import Candidate
from orchestrator.driver.node_reports import driver_report, node_reports
from orchestrator.planning.plan import Node
from orchestrator.policy.node_check import node_errors


def refuse_unfit_nodes(nodes: Sequence[Node], candidates: Sequence[Candidate]) -> None:
    """Ask each node on which a worker may start whether it can run the jobs; nothing if that is this machine alone.

    Raises:
        ConfigError: some nodes cannot, or do not answer within ``cluster.rendezvous_timeout_s``.
    """
    config = candidates[0].config.cluster
    asked = [node for node in nodes if node.cpus >= config.cpus_per_worker]
    if {node.node_id for node in asked} <= {ray.get_runtime_context().get_node_id()}:
        return
    modules = {c.config.job.target.rpartition(".")[0] for c in candidates if c.given is None}
    reports = node_reports(asked, timeout_s=config.rendezvous_timeout_s, job_modules=sorted(modules))
    if errors := node_errors(reports, driver_report()):
        raise ConfigError(errors)

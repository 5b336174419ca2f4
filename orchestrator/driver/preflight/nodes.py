"""The check of the nodes of a cluster before a worker starts on any of them."""

from __future__ import annotations

import sys
from collections.abc import Collection

import ray

from orchestrator.compat.ray.connection import raylets_here
from orchestrator.config.build import ConfigError
from orchestrator.config.schema import ClusterConfig
from orchestrator.driver.code.packages import ignored_errors, loaded_files
from orchestrator.driver.code.worker_code import WorkerCode
from orchestrator.driver.nodes.node_reports import driver_report, node_reports, with_memory_here, with_memory_of
from orchestrator.driver.process import cluster
from orchestrator.planning.plan import Node
from orchestrator.policy.node_check import node_errors


def nodes_to_plan_on(config: ClusterConfig, address: str) -> tuple[Node, ...]:
    """Return the nodes of a cluster that is not joined; of those on this machine with their memory.

    Raises:
        ConfigError: the cluster does not answer any more.
    """
    here = raylets_here()
    nodes = cluster.nodes_without_joining(config, address)
    return tuple(with_memory_here(node, here[node.node_id]) if node.node_id in here else node for node in nodes)


def fit_nodes(
    nodes: tuple[Node, ...], config: ClusterConfig, *, job_modules: Collection[str], code: WorkerCode
) -> tuple[Node, ...]:
    """Ask each node on which a worker may start whether it can import ``job_modules`` and run with ``code``.

    This machine is not asked if workers may start on it alone.

    Returns:
        The nodes with their memory, without those that Ray has found dead meanwhile.

    Raises:
        ConfigError: the code of the jobs does not travel; or some nodes cannot, or do not answer within
            ``cluster.pending_timeout_s``.
    """
    asked = [node for node in nodes if node.cpus >= config.cpus_per_worker]
    if {node.node_id for node in asked} <= {ray.get_runtime_context().get_node_id()}:
        here = raylets_here()
        return tuple(with_memory_here(node, here.get(node.node_id, {})) if node in asked else node for node in nodes)
    if code.working_dir is not None:
        modules = [sys.modules[name] for name in job_modules if name in sys.modules]
        needed = dict.fromkeys(loaded_files(code.working_dir, modules), "job._target_")
        if errors := ignored_errors(code.working_dir, needed, config.py_modules):
            raise ConfigError(errors)
    reports = node_reports(
        asked,
        timeout_s=config.pending_timeout_s,
        key="cluster.pending_timeout_s",
        job_modules=sorted(job_modules),
        code=code,
    )
    alive = {node.node_id for node in cluster.nodes()}
    of_living = [report for node, report in zip(asked, reports, strict=True) if node.node_id in alive]
    if errors := node_errors(of_living, driver_report()):
        raise ConfigError(errors)
    reported = dict(zip((node.node_id for node in asked), reports, strict=True))
    living = (node for node in nodes if node.node_id in alive)
    return tuple(with_memory_of(node, reported[node.node_id]) if node.node_id in reported else node for node in living)

"""The nodes of a cluster before a worker starts there: what each says of itself."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
import ray.exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.compat.ray.connection import raylets_here
from orchestrator.compat.ray.side_effects import pickled_by_value
from orchestrator.config.build import ConfigError
from orchestrator.config.operation import ClusterConfig
from orchestrator.driver.code.shipped_code import ignored_errors, loaded_files
from orchestrator.driver.code.worker_code import WorkerCode
from orchestrator.driver.process import cluster
from orchestrator.driver.process.calls import describe_error
from orchestrator.driver.process.waiting import node_answers
from orchestrator.planning.plan import Node
from orchestrator.policy.node_check import node_errors
from orchestrator.protocol.node_report import NodeReport, NoReport
from orchestrator.worker.process import node_facts

WORKER = "orchestrator.worker.actor"
"""The module of the workers."""


def driver_report() -> NodeReport:
    """Return the report of this process."""
    return NodeReport(**node_facts.node_facts())


def node_reports(nodes: Sequence[Node], *, timeout_s: float, key: str, **question: Any) -> list[NodeReport | NoReport]:
    """Return a report for each node, in order. Prints to stderr what a longer wait is for.

    Args:
        timeout_s: how long to wait for all of them.
        key: the configuration key of the timeout.
        question: see :func:`ask_nodes`.
    """
    reports = reports_in_time(ask_nodes(nodes, **question), timeout_s)
    late = f"did not answer within {timeout_s:g} s ({key})"
    return [reports.get(node) or _no_report(node, late) for node in nodes]


def ask_nodes(
    nodes: Sequence[Node],
    *,
    job_modules: Sequence[str],
    code: WorkerCode,
    output_dir: str | None = None,
    nonce: str | None = None,
    try_gpus: bool = False,
) -> dict[Any, Node]:
    """Ask each node for its report, and return the nodes by pending answer. Ray must be connected.

    The nodes have what the workers of a run will have: its ``code``, and the import paths of this process. What
    ``cluster.pip`` will install may be missing still, so the jobs are not imported then.

    Args:
        job_modules: the modules of the jobs, to import them beside the job of the workers.
        code: the code and the packages that travel to the workers.
        output_dir, nonce: see :func:`~orchestrator.worker.process.node_facts.node_facts`.
        try_gpus: whether to compute on the GPUs that Ray manages there.
    """
    facts_wanted = {
        "working_dir": str(Path.cwd()) if code.working_dir is None else None,
        "import_paths": [str(Path(path).resolve()) for path in sys.path],
        "modules": [WORKER, *([] if code.pip else job_modules)],
        "output_dir": output_dir,
        "nonce": nonce,
        "try_gpus": try_gpus,
    }
    arguments = {node: {"address": node.address, "num_gpus": node.gpus, **facts_wanted} for node in nodes}
    return on_nodes(node_facts.node_facts, arguments, code.runtime_env())


def reports_in_time(pending: dict[Any, Node], timeout_s: float) -> dict[Node, NodeReport | NoReport]:
    """Return what comes within ``timeout_s``, and remove it from the ``pending`` answers of :func:`ask_nodes`."""
    errors: dict[Node, ray.exceptions.RayError] = {}
    facts = node_answers(pending, timeout_s, wanted="the report", errors=errors)
    reports: dict[Node, NodeReport | NoReport] = {
        node: NodeReport(**{**answer, "name": node.name}) for node, answer in facts.items()
    }
    return reports | {node: _no_report(node, describe_error(error)) for node, error in errors.items()}


def _no_report(node: Node, reason: str) -> NoReport:
    return NoReport(name=node.name, address=node.address, reason=reason)


def with_memory_here(node: Node, environment: Mapping[str, str]) -> Node:
    """Return ``node``, which is this machine, with its memory. Its Ray was started with the ``environment``."""
    return replace(node, **node_facts.memory(node.gpus, environment))


def with_memory_of(node: Node, report: NodeReport | NoReport) -> Node:
    """Return ``node`` with the memory that it has reported."""
    if isinstance(report, NoReport):
        return node
    return replace(node, memory_bytes=report.memory_bytes, gpu_memory_bytes=report.gpu_memory_bytes)


def on_nodes(
    function: Callable[..., Any],
    arguments: Mapping[Node, Mapping[str, Any]],
    runtime_env: Mapping[str, Any] | None = None,
) -> dict[Any, Node]:
    """Call a function of ``node_facts`` on each node, with its ``arguments``; returns the nodes by pending answer."""
    task = ray.remote(num_cpus=0)(function)

    def call(node: Node) -> Any:
        where = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
        return task.options(scheduling_strategy=where, runtime_env=runtime_env).remote(**arguments[node])

    with pickled_by_value(node_facts):
        return {call(node): node for node in arguments}


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

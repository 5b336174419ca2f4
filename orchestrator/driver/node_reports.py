"""The reports of the nodes of a cluster: a task without CPUs on each of them, all at once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
import ray.exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.compat.ray.process import pickled_by_value
from orchestrator.driver.calls import answers_in_time, describe_error
from orchestrator.driver.worker_code import WorkerCode
from orchestrator.planning.plan import Node
from orchestrator.protocol.node_report import NodeReport, NoReport
from orchestrator.worker.process import node_facts

WORKER = "orchestrator.worker.actor"
"""The module of the workers."""


def driver_report() -> NodeReport:
    """Return the report of this process."""
    return NodeReport(**node_facts.node_facts())


def node_reports(
    nodes: Sequence[Node],
    *,
    timeout_s: float,
    job_modules: Sequence[str],
    code: WorkerCode,
    output_dir: str | None = None,
    nonce: str | None = None,
    with_gpus: bool = False,
) -> list[NodeReport | NoReport]:
    """Return a report for each node, in order. Ray must be connected.

    The nodes have what the workers of a run will have: its ``code``, and the import paths of this process. What
    ``cluster.pip`` will install may be missing still, so the jobs are not imported then.

    Args:
        nodes: the nodes to ask.
        timeout_s: how long to wait for all of them.
        job_modules: the modules of the jobs, to import them beside that of the workers.
        code: the code and the packages that travel to the workers.
        output_dir, nonce, with_gpus: see :func:`~orchestrator.worker.process.node_facts.node_facts`.
    """
    questions = {
        "working_dir": str(Path.cwd()) if code.working_dir is None else None,
        "import_paths": [str(Path(path).resolve()) for path in sys.path],
        "modules": [WORKER, *([] if code.pip else job_modules)],
        "output_dir": output_dir,
        "nonce": nonce,
        "with_gpus": with_gpus,
    }
    errors: dict[Node, ray.exceptions.RayError] = {}
    arguments = {n: {"address": n.address, **questions} for n in nodes}
    pending = on_nodes(node_facts.node_facts, arguments, code.runtime_env())
    facts = answers_in_time(pending, timeout_s, errors=errors)

    def report(node: Node) -> NodeReport | NoReport:
        if node in facts:
            return NodeReport(**{**facts[node], "name": node.name})
        late = f"did not answer within {timeout_s:g} s (cluster.rendezvous_timeout_s)"
        reason = describe_error(errors[node]) if node in errors else late
        return NoReport(name=node.name, address=node.address, reason=reason)

    return [report(node) for node in nodes]


def on_nodes(
    function: Callable[..., Any],
    arguments: Mapping[Node, Mapping[str, Any]],
    runtime_env: Mapping[str, Any] | None = None,
) -> dict[Any, Node]:
    """Call a function of ``node_facts`` on each node, with its ``arguments``; returns the nodes by pending answer."""
    task = ray.remote(num_cpus=0, max_retries=0)(function)

    def call(node: Node) -> Any:
        where = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
        return task.options(scheduling_strategy=where, runtime_env=runtime_env).remote(**arguments[node])

    with pickled_by_value(node_facts):
        return {call(node): node for node in arguments}

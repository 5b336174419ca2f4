"""The Ray of a launch, for all of its runs."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator, Sequence

import ray

from orchestrator.driver.checked_runs import CheckedRun, planned_on, this_machine
from orchestrator.driver.code.worker_code import CodeCache
from orchestrator.driver.loops import Loop
from orchestrator.driver.nodes.node_reports import fit_nodes, nodes_to_plan_on
from orchestrator.driver.process import cluster
from orchestrator.driver.reporting import job_metadata
from orchestrator.planning.plan import Node
from orchestrator.policy.elastic import Sizes
from orchestrator.policy.node_check import exposure_warning
from orchestrator.records.sweep_dir import membership


@contextlib.contextmanager
def ray_of(
    checked_runs: Sequence[CheckedRun], loop: Loop | None, codes: CodeCache
) -> Iterator[tuple[tuple[Node, ...], list[tuple[CheckedRun, Sizes]]]]:
    """Connect to one Ray for all runs; yields its nodes, and the runs with their sizes on them.

    Without a cluster, a Ray is embedded. ``plan=true`` joins none, nor does ``debug=true``.
    """
    config = checked_runs[0].config
    if config.debug:
        yield (this_machine(),), [(c, c.sizes) for c in checked_runs if c.sizes is not None]
        return
    address = cluster.target_address(config.cluster)
    metadata = job_metadata([c.config for c in checked_runs], checked_runs[0].redactor)
    if address is not None and config.plan:
        nodes = nodes_to_plan_on(config.cluster, address)
        yield nodes, planned_on(nodes, checked_runs, loop)
        return
    if address is not None:
        with cluster.connected(address, metadata=metadata):
            if membership() is None:
                if (choice := cluster.choice_of_address(config.cluster)) is not None:
                    print(choice, flush=True)
                _warn_of_strangers(ray.get_runtime_context().gcs_address)
            nodes = cluster.allowed_nodes(config.cluster)
            modules = {module for c in checked_runs for module in c.config.modules(with_job=c.given is None)}
            nodes = fit_nodes(
                nodes, config.cluster, job_modules=modules, code=codes.get(config.cluster, checked_runs[0].scripts)
            )
            yield nodes, planned_on(nodes, checked_runs, loop)
        return
    machine = this_machine()
    planned = [(c, c.sizes) for c in checked_runs if c.sizes is not None]
    if config.plan:
        yield (machine,), planned
        return
    with cluster.embedded(
        config.cluster,
        num_cpus=max(c.max_cpus for c, _ in planned) + machine.cpus,  # for tasks that read the data
        num_gpus=machine.gpus,
        num_processes=max(s.max_processes for _, s in planned),
        metadata=metadata,
    ):
        yield (machine,), planned


@functools.cache
def _warn_of_strangers(gcs_address: str) -> None:
    """Print a warning, once, if everybody may use the Ray at ``gcs_address``, which is connected."""
    if (warning := exposure_warning(gcs_address, required=cluster.asks_for_token())) is not None:
        print(f"warning: {warning}", file=sys.stderr)

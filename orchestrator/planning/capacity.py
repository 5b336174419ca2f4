"""What the nodes have for a plan: room, memory and devices, and what to change if that is not enough."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from orchestrator.config.schema import Config
from orchestrator.config.text import first_few
from orchestrator.planning.layout import Layout, LayoutRules
from orchestrator.planning.memory import UNKNOWN, MemoryLimit, NodeShare
from orchestrator.planning.mesh import workers_on_node, workers_on_nodes

if TYPE_CHECKING:
    from orchestrator.planning.plan import Node, Plan


def find_workers_per_node(
    config: Config, nodes: tuple[Node, ...], device: str, num_workers: int, oversubscribe_cpus: bool
) -> list[int]:
    """Return how many workers of one device fit on each node, and on further nodes like the largest if need be."""
    if oversubscribe_cpus:
        return [num_workers]
    each = {"CPU": config.cluster.cpus_per_worker, "GPU": float(device == "cuda")}
    workers_per_node = [workers_on_node(each, node.resources) for node in nodes]
    largest = max(workers_per_node, default=0) or num_workers
    missing = max(0, num_workers - sum(workers_per_node))
    return workers_per_node + [largest] * math.ceil(missing / largest)


def memory_limit(config: Config, nodes: tuple[Node, ...], device: str) -> MemoryLimit:
    """Return the memory of the smallest GPU, or on CPUs that of the largest node and of all nodes."""
    if device == "cuda":
        return MemoryLimit(largest_bytes=min((n.gpu_memory_bytes for n in nodes if n.gpus), default=0))
    if config.cluster.autoscaling or not all(node.memory_bytes for node in nodes):
        return UNKNOWN
    of_nodes = [node.memory_bytes for node in nodes]
    return MemoryLimit(largest_bytes=max(of_nodes, default=0), total_bytes=sum(of_nodes))


def tightest_node(nodes: tuple[Node, ...], workers_per_node: list[int], num_processes: int) -> NodeShare:
    """Return the node whose workers have least host memory each, if every node has as many as fit on it."""
    shares = [
        NodeShare(
            workers=min(fitting, num_processes), memory_bytes=node.memory_bytes, is_only=len(workers_per_node) == 1
        )
        for node, fitting in zip(nodes, workers_per_node, strict=False)  # there may be room on nodes to come
        if fitting
    ]
    return min(shares, key=lambda share: share.memory_bytes / share.workers, default=NodeShare())


def gpus_of_worker(layout: Layout, device: str) -> int:
    """Return how many GPUs a worker has on a device of this type."""
    return layout.devices_per_worker if device == "cuda" else 0


def device_errors(
    config: Config,
    rules: type[LayoutRules[Any]],
    layout: Layout,
    nodes: tuple[Node, ...],
    device: str,
    num_workers: int,
    oversubscribe_cpus: bool,
) -> list[str]:
    """Return why the nodes lack the devices or CPUs that the layout needs."""
    name, cluster = config.strategy.name, config.cluster
    if rules.cpu_only and device == "cuda":
        return [f"strategy={name}: {rules.cpu_only}; set cluster.device=cpu, or use strategy=ddp"]
    if cluster.autoscaling:
        return []  # the cluster may gain nodes that have what is missing
    if layout.one_node:
        return _one_node_errors(config, nodes, num_workers, oversubscribe_cpus)
    if device == "cuda" and not any(n.gpus for n in nodes):
        return [f"cluster.device=cuda: no node has a GPU ({_inventory(nodes)}); set it to cpu or auto"]
    return _capacity_errors(config, nodes, layout, gpus_of_worker(layout, device), oversubscribe_cpus)


def _one_node_errors(config: Config, nodes: tuple[Node, ...], num_workers: int, oversubscribe_cpus: bool) -> list[str]:
    name, cpus = config.strategy.name, config.cluster.cpus_per_worker
    needed = num_workers + config.recovery.spares
    possible = workers_on_nodes({"CPU": cpus}, [node.resources for node in nodes], one_node=True)
    if oversubscribe_cpus or possible >= needed:
        return []
    return [
        f"{_requested(config, num_workers)}: strategy={name} needs {needed} x {cpus:g} CPUs on one node, "
        f"there is room for {possible} ({_inventory(nodes)}); lower it or cluster.cpus_per_worker, or use strategy=ddp"
    ]


def _capacity_errors(
    config: Config, nodes: tuple[Node, ...], layout: Layout, gpus_per_worker: int, oversubscribe_cpus: bool
) -> list[str]:
    mesh, devices = layout.mesh, layout.devices_per_worker
    needed, cpus = mesh.world_size + config.recovery.spares, config.cluster.cpus_per_worker * devices
    resources = [node.resources for node in nodes]
    keys = _requested(config, mesh.num_workers * devices, num_servers=mesh.num_servers)
    if gpus_per_worker and workers_on_nodes({"GPU": gpus_per_worker}, resources) < needed:
        gpus = f"{needed * gpus_per_worker} GPUs"
        if devices > 1:
            gpus = f"{gpus} on one node" if needed == 1 else f"{needed} groups of {devices} GPUs, each on one node"
        return [
            f"{keys}: needs {gpus}, the cluster has {sum(n.gpus for n in nodes)} "
            f"({_inventory(nodes)}); lower it, add nodes, or set cluster.device=cpu"
        ]
    possible = workers_on_nodes({"CPU": cpus, "GPU": gpus_per_worker}, resources)
    if possible < needed and not oversubscribe_cpus:
        where = " on the nodes of the GPUs" if gpus_per_worker else ""
        return [
            f"{keys}: needs {needed} x {cpus:g} CPUs{where}, there is room for {possible} ({_inventory(nodes)}); "
            "lower it or cluster.cpus_per_worker, or add nodes"
        ]
    return []


def cpus_for_data(plan: Plan, nodes: Sequence[Node] | None) -> tuple[str, str | None]:
    """Return a note on the CPUs for tasks that read the data beside the workers, and an error if there are none.

    ``nodes``: None for a Ray that counts no CPUs.
    """
    where = "the data is read by tasks beside the workers"
    if nodes is None:
        return f"{where}, on the cores of this machine", None
    total, workers = sum(node.cpus for node in nodes), plan.world_size + plan.spares
    left = total - workers * plan.cpus_per_worker
    note = f"{where}, on {left:g} of {total:g} CPUs"
    each = {"CPU": plan.cpus_per_worker}
    for free in range(len(nodes)):
        beside = [{"CPU": node.cpus - (number == free)} for number, node in enumerate(nodes)]
        if beside[free]["CPU"] >= 0 and workers_on_nodes(each, beside) >= workers:
            return note, None
    return note, (
        f"job.dataset: {where}, and {workers} x {plan.cpus_per_worker:g} of the {total:g} CPUs are for them, which "
        "leaves none on any node; lower strategy.num_workers or cluster.cpus_per_worker, or add nodes"
    )


def _requested(config: Config, num_workers: int, *, num_servers: int = 0) -> str:
    """Return what decides how many processes there are, as typed on the command line."""
    counts = {
        "strategy.num_workers": num_workers,
        "strategy.num_shards": num_servers,
        "recovery.spares": config.recovery.spares,
    }
    return " and ".join(f"{key}={count}" for key, count in counts.items() if count)


def _inventory(nodes: tuple[Node, ...]) -> str:
    listed = [f"{n.name}: {n.cpus:g} CPUs and {n.gpus} GPUs" for n in nodes]
    return first_few(listed, noun="nodes") or "no nodes"

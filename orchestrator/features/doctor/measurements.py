"""The clocks of the nodes of a cluster, and an all-reduce across them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.driver.nodes.node_reports import on_nodes
from orchestrator.driver.process.calls import all_answers
from orchestrator.features.doctor.network_probe import LARGE_BYTES, NetworkProbe
from orchestrator.features.doctor.node_checks import AllReduce, ClockOffset
from orchestrator.planning.plan import Node
from orchestrator.worker.process import node_facts
from orchestrator.worker.process.network import LOOPBACK

MOST_NODES = 8
"""Nodes that take part in the all-reduce."""
CLOCK_READINGS = 3


def clock_offset(node: Node, *, timeout_s: float) -> ClockOffset:
    """Return the offset of the clock of ``node``, from the fastest of a few readings.

    Raises:
        RayError: the node does not answer.
    """
    readings = []
    for _ in range(CLOCK_READINGS):
        asked = time.time()
        (there,) = ray.get(list(on_nodes(node_facts.wall_clock, {node: {}})), timeout=timeout_s)
        answered = time.time()
        error_s = (answered - asked) / 2
        readings.append(ClockOffset(offset_s=there - (asked + error_s), error_s=error_s))
    return min(readings, key=lambda reading: reading.error_s)


def measure_all_reduce(nodes: Sequence[Node], *, on_gpus: bool, timeout_s: float) -> AllReduce:
    """Measure an all-reduce with a process on each of the first nodes, or with two processes on a single one.

    Args:
        nodes: the nodes on which a process can start, at least one.
        on_gpus: whether to use NCCL, with a GPU that is free on each of them.
        timeout_s: how long to wait for the processes, and then for the result.

    Raises:
        GangError: they did not answer in time.
        RayError: a process died, or could not form the group.
    """
    places = list(nodes[:MOST_NODES]) if len(nodes) > 1 else [nodes[0], nodes[0]]
    addresses = [node.address if len(nodes) > 1 else LOOPBACK for node in places]
    actors = [_start(node, on_gpu=on_gpus) for node in places]
    try:
        (port,) = all_answers([actors[0].open_store.remote(addresses[0], timeout_s)], timeout_s)
        measurements = [
            actor.measure.remote(
                rank=rank,
                world_size=len(actors),
                store=(addresses[0], port),
                address=address,
                on_gpu=on_gpus,
                timeout_s=timeout_s,
            )
            for rank, (actor, address) in enumerate(zip(actors, addresses, strict=True))
        ]
        times = all_answers(measurements, timeout_s)
    finally:
        for actor in actors:
            ray.kill(actor)
    small_ms, large_ms = (max(column) for column in zip(*times, strict=True))
    # What each process sends, as in a ring.
    sent_mb = 2 * (len(actors) - 1) / len(actors) * LARGE_BYTES / 1e6
    return AllReduce(
        backend="nccl" if on_gpus else "gloo",
        processes=len(actors),
        nodes=min(len(nodes), MOST_NODES),
        address=addresses[0],
        latency_ms=small_ms,
        bandwidth_mb_s=sent_mb / (large_ms / 1e3),
    )


def _start(node: Node, *, on_gpu: bool) -> Any:
    where = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
    actor = ray.remote(num_cpus=0, num_gpus=int(on_gpu), max_restarts=0)(NetworkProbe)
    return actor.options(scheduling_strategy=where).remote()

"""The order of the ranks over nodes and GPUs. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from orchestrator.protocol.messages import WorkerInfo


def rank_order(workers: Sequence[WorkerInfo]) -> list[int]:
    """Return the indices of ``workers`` in the order of their ranks: by node address, then by GPU number."""

    def key(index: int) -> tuple[int, str, int, int]:
        info = workers[index]
        gpu = -1 if info.gpu_index is None else info.gpu_index
        return int(ipaddress.ip_address(info.node_ip)), info.node_id, gpu, index

    return sorted(range(len(workers)), key=key)


def shards_last(workers: Sequence[WorkerInfo], order: Sequence[int], *, num_shards: int) -> list[int]:
    """Return ``order`` with ``num_shards`` of its indices moved to the end: the ranks that hold parameters.

    They are spread over the nodes: each goes to the node with the fewest shards so far, and among several such nodes
    to the one with the most workers that are not shards.
    """
    training = list(order)
    shards: list[int] = []

    def crowd(index: int) -> tuple[int, int]:
        node_id = workers[index].node_id
        return (
            sum(workers[i].node_id == node_id for i in shards),
            -sum(workers[i].node_id == node_id for i in training),
        )

    for _ in range(num_shards):
        chosen = min(reversed(training), key=crowd)
        training.remove(chosen)
        shards.append(chosen)
    return training + shards

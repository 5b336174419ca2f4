"""Who sits where: the order of the ranks over nodes and GPUs, and a GPU for each. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from orchestrator.protocol.messages import WorkerInfo


def rank_order(places: Sequence[WorkerInfo]) -> list[int]:
    """Indices in the order of the ranks: node by node (by address), then by GPU number."""

    def key(index: int) -> tuple[int, str, int, int]:
        info = places[index]
        gpu = -1 if info.gpu_index is None else info.gpu_index
        return int(ipaddress.ip_address(info.node_ip)), info.node_id, gpu, index

    return sorted(range(len(places)), key=key)


def shards_last(places: Sequence[WorkerInfo], order: Sequence[int], *, num_shards: int) -> list[int]:
    """``order`` with ``num_shards`` of its indices at the end, spread over the nodes: those that hold parameters.

    Each in turn goes to the node with the fewest shards, of those to the one with the most workers left.
    """
    workers = list(order)
    shards: list[int] = []

    def crowd(index: int) -> tuple[int, int]:
        node_id = places[index].node_id
        return (
            sum(places[i].node_id == node_id for i in shards),
            -sum(places[i].node_id == node_id for i in workers),
        )

    for _ in range(num_shards):
        chosen = min(reversed(workers), key=crowd)
        workers.remove(chosen)
        shards.append(chosen)
    return workers + shards


def shared_device(places: Sequence[WorkerInfo]) -> str | None:
    """Which two workers share one GPU, and what to do about it; None if each has its own."""
    owner: dict[str, int] = {}
    for index, info in enumerate(places):
        if info.gpu_uuid is None:
            continue
        if info.gpu_uuid in owner:
            return (
                f"workers {owner[info.gpu_uuid]} and {index} share one GPU ({info.gpu_uuid} on "
                f"{info.hostname}); NCCL needs one each. Lower strategy.num_workers to the number "
                "of GPUs, or start Ray with --num-gpus as many as there are"
            )
        owner[info.gpu_uuid] = index
    return None

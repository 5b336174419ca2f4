"""The GPUs of the workers of a run: whether they can train on them, and the order of the ranks over them. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Container, Sequence
from dataclasses import replace
from typing import Literal

from orchestrator.config.schema import TrainConfig
from orchestrator.config.text import first_few
from orchestrator.planning.mesh import Mesh
from orchestrator.protocol.messages import SHOW_ALL_GPUS, WorkerInfo

MAX_LISTED = 4
"""GPUs named in one error message."""


def unusable_gpus(workers: Sequence[WorkerInfo], requested: Literal["auto", "cpu", "cuda"]) -> str | None:
    """Return an error message if some workers cannot use their GPUs; None if the run can start.

    With ``auto`` the run can also start if no worker can use a GPU: then it trains on CPUs.

    Args:
        workers: all workers, spares included.
        requested: ``cluster.device``.
    """
    unusable = [w for w in workers if w.gpu_error is not None]
    if not unusable or (requested == "auto" and len(unusable) == len(workers)):
        return None
    named = first_few([f"{w.place}, {w.gpu_error}" for w in unusable], MAX_LISTED, separator="; ")
    return (
        f"cluster.device={requested}: {len(unusable)} of {len(workers)} workers cannot use their GPU: "
        f"{named}. Repair the GPU, hide it with CUDA_VISIBLE_DEVICES where Ray is started on that "
        "node, start Ray there with --num-gpus=0, or set cluster.device=cpu"
    )


def can_join(spare: WorkerInfo, members: Sequence[WorkerInfo]) -> bool:
    """Return whether a spare could take a rank beside ``members``: it can use its GPU if they can use theirs."""
    return spare.gpu_error is None or all(member.gpu_uuid is None for member in members)


def shared_gpu(workers: Sequence[WorkerInfo]) -> str | None:
    """Return an error message if two workers share one GPU; None if each has its own."""
    owner: dict[str, int] = {}
    for index, info in enumerate(workers):
        if info.gpu_uuid is None:
            continue
        if info.gpu_uuid in owner:
            remedy = "Lower strategy.num_workers to the number of GPUs, or start Ray with --num-gpus set to that number"
            if info.sees_all_gpus:
                remedy = f"Unset {SHOW_ALL_GPUS} where Ray is started, so that Ray gives each worker a GPU of its own"
            return (
                f"workers {owner[info.gpu_uuid]} and {index} share one GPU ({info.gpu_uuid} on "
                f"{info.hostname}); NCCL needs one GPU for each. {remedy}"
            )
        owner[info.gpu_uuid] = index
    return None


def with_common_precision(train: TrainConfig, workers: Sequence[WorkerInfo], *, refused: Container[str]) -> TrainConfig:
    """Return ``train`` with the precision of all ranks in place of ``auto``: bfloat16 if every worker has it.

    Args:
        train: the section of the configuration.
        workers: all workers, spares included.
        refused: the precisions that the strategy does not support.
    """
    if train.precision != "auto":
        return train
    has_bf16 = "bf16" not in refused and all(worker.has_bf16 for worker in workers)
    return replace(train, precision="bf16" if has_bf16 else "fp32")


MAX_GROUPS_LISTED = 4


def rank_order(workers: Sequence[WorkerInfo]) -> list[int]:
    """Return the indices of ``workers`` in the order of their ranks: by node address, then by GPU number."""

    def key(index: int) -> tuple[int, str, int, int]:
        info = workers[index]
        gpu = -1 if info.gpu_index is None else info.gpu_index
        return int(ipaddress.ip_address(info.node_ip)), info.node_id, gpu, index

    return sorted(range(len(workers)), key=key)


def groups_on_one_node(workers: Sequence[WorkerInfo], order: Sequence[int], *, group_size: int) -> list[int]:
    """Return ``order`` changed such that as many groups of ``group_size`` consecutive ranks as possible share a node.

    Each node first gets as many complete groups as it has room for, in the order of the nodes. The workers that are
    left form the last groups, which cross nodes.
    """
    by_node: dict[str, list[int]] = {}
    for index in order:
        by_node.setdefault(workers[index].node_id, []).append(index)
    complete: list[int] = []
    rest: list[int] = []
    for indices in by_node.values():
        num_complete = len(indices) // group_size * group_size
        complete += indices[:num_complete]
        rest += indices[num_complete:]
    return complete + rest


def placement_note(mesh: Mesh, workers: Sequence[WorkerInfo]) -> str | None:
    """Return which groups that should share a node cross nodes, for the user; None if there are none.

    Args:
        workers: the worker of each rank.
    """
    if len(mesh.close_groups) == 1 or len(mesh.close_groups[0]) == 1:
        return None
    crossing: list[str] = []
    for number, group in enumerate(mesh.close_groups):
        nodes = {workers[rank].node_id: workers[rank].hostname for rank in group}
        if len(nodes) > 1:
            crossing.append(f"{number} ({', '.join(nodes.values())})")
    if not crossing:
        return None
    if mesh.replicas_close:
        flow, groups = "gradients", "stages"
    else:
        flow, groups = ("parameters", "replicas") if mesh.divides_tensors else ("activations", "pipelines")
    return (
        f"{flow} go through the network in {len(crossing)} of {len(mesh.close_groups)} {groups}: "
        f"{first_few(crossing, MAX_GROUPS_LISTED)}"
    )


def servers_last(workers: Sequence[WorkerInfo], order: Sequence[int], *, num_servers: int) -> list[int]:
    """Return ``order`` with ``num_servers`` of its indices moved to the end: the ranks that hold parameters.

    They are spread over the nodes: each goes to the node with the fewest servers so far, and among several such nodes
    to the one with the most workers that are not servers.
    """
    training = list(order)
    servers: list[int] = []

    def crowd(index: int) -> tuple[int, int]:
        node_id = workers[index].node_id
        return (
            sum(workers[i].node_id == node_id for i in servers),
            -sum(workers[i].node_id == node_id for i in training),
        )

    for _ in range(num_servers):
        chosen = min(reversed(training), key=crowd)
        training.remove(chosen)
        servers.append(chosen)
    return training + servers

"""Whether the workers of a run can train on the GPUs that Ray has given them, and in which precision. Pure."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace
from typing import Literal

from orchestrator.config.schema import TrainConfig
from orchestrator.config.text import first_few
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

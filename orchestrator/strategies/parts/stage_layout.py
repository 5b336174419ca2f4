"""The layout of a model that is cut into stages: mesh, stages and micro-batches. Pure functions, no torch."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

from orchestrator.config.schema import TrainConfig
from orchestrator.planning.layout import Layout
from orchestrator.planning.mesh import Mesh, share_sizes
from orchestrator.planning.schedules import SCHEDULES, PipelineLayout, Schedule
from orchestrator.strategies.keys import MeshConfig


def at_other_size(options: MeshConfig, mesh: Mesh, pipeline: PipelineLayout, *, replicas: int) -> MeshConfig | None:
    """Return ``options`` for so many replicas of the pipelines of ``mesh``; None if they could not share the batch.

    Fewer replicas get more micro-batches of the same size: activations between stages keep their shape.
    """
    microbatches, rest = divmod(pipeline.num_microbatches * mesh.replicate, replicas)
    return None if rest else dataclasses.replace(options, num_microbatches=microbatches)


def reshard_errors(schedule: str) -> list[str]:
    """Return why stages cannot free what their forward passes have gathered."""
    if not SCHEDULES[schedule].splits_backward:
        return []
    return [
        f"strategy.reshard_after_forward=true: {schedule} computes the gradients of parameters in passes of their own, "
        "which gather nothing; set it to false, or use strategy.schedule=1F1B or Interleaved1F1B"
    ]


def staged(options: MeshConfig, train: TrainConfig, mesh: Mesh, errors: list[str], *, valid_mesh: bool) -> Layout:
    """Return the layout of a model that is cut into stages.

    Args:
        options: the keys of a strategy with stages.
        train: the ``train`` section of the configuration.
        mesh: the grid of ranks.
        errors: receives a line for each error, which names the key to change.
        valid_mesh: whether the number of workers allows ``mesh``; if not, the batch is not checked against it.

    Returns:
        The layout; its ``pipeline`` is None after an error.
    """
    return Layout(
        mesh=mesh,
        pipeline=_pipeline(options, train, mesh, errors, valid_mesh=valid_mesh),
        split=None if options.split == "auto" else options.split,
    )


def _pipeline(
    strategy: MeshConfig, train: TrainConfig, mesh: Mesh, errors: list[str], *, valid_mesh: bool
) -> PipelineLayout | None:
    """Return stages and micro-batches; None if they are impossible, with the reasons appended to ``errors``."""
    p, before = mesh.pipeline, len(errors)
    requested, schedule = strategy.num_microbatches, SCHEDULES[strategy.schedule]
    num_stages = p * _stages_per_rank(strategy, schedule, errors)
    if requested != "auto" and (error := schedule.microbatches_error(requested, num_stages, p)):
        errors.append(f"strategy.num_microbatches={requested}: {error}")

    def microbatches_for(global_batch_size: int) -> int | None:
        """Return the number of micro-batches for a batch of this size; None if they would differ in size.

        The buffers between stages have a fixed shape.
        """
        shares = share_sizes(global_batch_size, mesh.data_parallel_size)
        slices = {share // train.grad_accumulation for share in shares}
        if 0 in slices or any(share % train.grad_accumulation for share in shares):
            return None
        if requested == "auto":
            return schedule.choose_microbatches(slices, num_stages, p)
        return None if any(n % requested for n in slices) else requested

    num_microbatches = microbatches_for(train.global_batch_size)
    if num_microbatches is None and valid_mesh:
        errors.append(_uneven_batch_error(strategy, train, mesh, microbatches_for))
    if len(errors) > before or num_microbatches is None or not valid_mesh:
        return None
    return PipelineLayout(
        schedule=schedule.name,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        stage_ranks=schedule.stage_ranks(num_stages, p),
    )


def _stages_per_rank(strategy: MeshConfig, schedule: Schedule, errors: list[str]) -> int:
    requested, needed = strategy.stages_per_rank, schedule.stages_per_rank
    if requested == "auto":
        return needed
    if requested < needed or (requested > needed and not schedule.more_stages):
        bound = "at least" if schedule.more_stages else "exactly"
        errors.append(
            f"strategy.stages_per_rank={requested}: {schedule.name} needs {bound} {needed}; set it to {needed}"
        )
    return requested


def _uneven_batch_error(
    strategy: MeshConfig, train: TrainConfig, mesh: Mesh, microbatches_for: Callable[[int], int | None]
) -> str:
    """Return the error for a batch that cannot be cut evenly, with the nearest batch sizes that can be."""
    batch = train.global_batch_size
    pieces, keys = [], []
    if mesh.data_parallel_size > 1:
        pieces.append(f"{mesh.data_parallel_size} replicas")
    if train.grad_accumulation > 1:
        pieces.append(f"{train.grad_accumulation} slices")
        keys.append("train.grad_accumulation")
    if strategy.num_microbatches == "auto":
        pieces.append(f"micro-batches for {strategy.schedule}")
        keys.append("strategy.schedule")
    elif strategy.opens("num_microbatches"):
        pieces.append(f"{strategy.num_microbatches} micro-batches")
        keys.append("strategy.num_microbatches")
    below = next((n for n in range(batch - 1, 0, -1) if microbatches_for(n)), None)
    above = next(n for n in itertools.count(batch + 1) if microbatches_for(n))
    nearest = f"{below} or {above}" if below else f"{above}"
    return (
        f"train.global_batch_size={batch}: cannot be cut evenly into {' x '.join(pieces)}; "
        f"set it to {nearest}, or change {' or '.join(keys)}"
    )

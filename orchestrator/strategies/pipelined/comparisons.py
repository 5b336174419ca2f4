"""What rank 0 compares before a pipeline trains: the stages with the whole model, and a batch with its parts."""

from __future__ import annotations

from typing import Any

from torch import nn

from orchestrator.job import Job
from orchestrator.model.precision import Precision
from orchestrator.strategies.data.batch_parts import (
    BatchDivision,
    by_keys,
    mean_loss,
    not_compared,
    warning_about_parts,
)
from orchestrator.strategies.pipelined.stage_builder import StageBuilder
from orchestrator.strategies.rank_context import Context


def compare_with_whole(
    builder: StageBuilder, job: Job, train_set: Any, *, context: Context, precision: Precision, rows: int
) -> tuple[str, ...]:
    """Return what the user should know of the stages and of the micro-batches.

    Args:
        builder: the outline of the model.
        job: calls the whole model, and has its loss.
        train_set: provides samples.
        context: the place of this rank.
        precision: what the forward passes are computed in.
        rows: the number of samples of a micro-batch.

    Raises:
        ValueError: the stages train otherwise than the whole model.
    """
    division = _division(context, rows)
    examined: list[str | None] = []

    def examine(whole: nn.Module) -> None:
        if division is not None:
            examined.append(
                warning_about_parts(
                    whole,
                    job,
                    train_set,
                    division,
                    device=context.device,
                    precision=precision,
                    seed=context.seed,
                    loss=mean_loss(job),
                )
            )

    notes = [builder.check_parity(examine=examine), *examined]
    if division is not None and not examined:
        notes.append(not_compared(division, "rank 0 has no memory for the whole model"))
    return tuple(note for note in notes if note is not None)


def _division(context: Context, rows: int) -> BatchDivision | None:
    """Return how replicas and micro-batches divide the global batch; None if they do not."""
    assert context.pipeline is not None
    replicas, slices = context.mesh.data_parallel_size, context.train.grad_accumulation
    microbatches = context.pipeline.num_microbatches
    if replicas * slices * microbatches == 1:
        return None
    return BatchDivision(
        by=by_keys(
            context.options.name,
            num_workers=context.mesh.num_workers if replicas > 1 else 1,
            num_microbatches=microbatches,
            grad_accumulation=slices,
        ),
        rows=rows,
        in_turn=slices * microbatches > 1,
        cut=replicas * slices == 1,
    )

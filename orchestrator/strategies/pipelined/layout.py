"""How a model that is cut into stages is laid over ranks: meshes, stages and micro-batches. Pure, no torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from orchestrator.config.schema import Config, StrategyConfig, option
from orchestrator.planning.layout import Layout
from orchestrator.planning.mesh import Mesh, even_shares
from orchestrator.planning.schedules import SCHEDULES, PipelineLayout, Schedule


@dataclass(frozen=True, kw_only=True)
class StagedConfig(StrategyConfig):
    """What every strategy has that cuts the model into stages."""

    elastic = True

    split: Literal["auto"] | tuple[str, ...] = option(
        "auto: stages of equal measured time; or the names of the layers where the stages after the first begin"
    )


@dataclass(frozen=True, kw_only=True)
class PipelinedConfig(StagedConfig):
    """What a strategy with micro-batches has besides."""

    schedule: Literal[
        "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
    ] = option("order of forward and backward passes")
    num_microbatches: int | Literal["auto"] = option(
        "slices of the batch that flow through the stages; auto: about two per stage", minimum=1
    )
    stages_per_rank: int | Literal["auto"] = option("stages on each worker; auto: what the schedule needs", minimum=1)


def one_pipeline(config: Config, num_workers: int, errors: list[str]) -> Layout:
    """A stage, or several, on each of ``num_workers`` workers."""
    if num_workers < 2:
        errors.append(
            f"strategy.num_workers={num_workers}: strategy={config.strategy.name} needs at least 2, one per stage; "
            "use strategy=single for one"
        )
    return staged(config, Mesh(pipeline_parallel_size=num_workers), errors, fits=num_workers >= 2)


def staged(config: Config, mesh: Mesh, errors: list[str], *, fits: bool, notes: tuple[str, ...] = ()) -> Layout:
    """The layout on ``mesh``. ``fits``: the mesh is what was asked for, so that the batch can be judged by it."""
    options = config.strategy
    assert isinstance(options, StagedConfig)
    return Layout(
        mesh=mesh,
        pipeline=_pipeline(config, mesh, errors, fits=fits),
        split=None if options.split == "auto" else options.split,
        notes=notes,
    )


def _pipeline(config: Config, mesh: Mesh, errors: list[str], *, fits: bool) -> PipelineLayout | None:
    """How the pipeline works; None if it cannot, for reasons that are appended to ``errors``."""
    strategy, train, p = config.strategy, config.train, mesh.pipeline_parallel_size
    before = len(errors)
    asked: int | Literal["auto"] = 1
    schedule, per_rank = SCHEDULES["GPipe"], 1
    if isinstance(strategy, PipelinedConfig):
        asked, schedule = strategy.num_microbatches, SCHEDULES[strategy.schedule]
        per_rank = _stages_per_rank(strategy, schedule, errors)
    num_stages = p * per_rank
    if asked != "auto" and (error := schedule.microbatches_error(asked, num_stages, p)):
        errors.append(f"strategy.num_microbatches={asked}: {error}")

    def microbatches(global_batch_size: int) -> int | None:
        """Their number for a batch of this size; None: it cannot be cut into micro-batches of one size, which the
        stages' buffers have."""
        shares = set(even_shares(global_batch_size, mesh.data_parallel_size))
        slices = {share // train.grad_accumulation for share in shares}
        if 0 in slices or any(share % train.grad_accumulation for share in shares):
            return None
        if asked == "auto":
            return schedule.choose_microbatches(slices, num_stages, p)
        return None if any(n % asked for n in slices) else asked

    chosen = microbatches(train.global_batch_size)
    if chosen is None and fits:
        errors.append(_uneven(config, mesh, microbatches))
    if len(errors) > before or chosen is None or not fits:
        return None
    return PipelineLayout(
        schedule=schedule.name,
        num_stages=num_stages,
        num_microbatches=chosen,
        stage_ranks=schedule.stage_ranks(num_stages, p),
    )


def _stages_per_rank(strategy: PipelinedConfig, schedule: Schedule, errors: list[str]) -> int:
    asked, needed = strategy.stages_per_rank, schedule.stages_per_rank
    if asked == "auto":
        return needed
    if asked < needed or (asked > needed and not schedule.more_stages):
        least = "at least" if schedule.more_stages else "exactly"
        errors.append(f"strategy.stages_per_rank={asked}: {schedule.name} needs {least} {needed}; set it to {needed}")
    return asked


def _uneven(config: Config, mesh: Mesh, microbatches: Callable[[int], int | None]) -> str:
    """Says into what the batch cannot be cut, and the sizes next to it that can be."""
    strategy, train = config.strategy, config.train
    batch = train.global_batch_size
    pieces, keys = [], []
    if mesh.data_parallel_size > 1:
        pieces.append(f"{mesh.data_parallel_size} replicas")
    if train.grad_accumulation > 1:
        pieces.append(f"{train.grad_accumulation} slices")
        keys.append("train.grad_accumulation")
    if isinstance(strategy, PipelinedConfig) and strategy.num_microbatches == "auto":
        pieces.append(f"micro-batches for {strategy.schedule}")
        keys.append("strategy.schedule")
    elif isinstance(strategy, PipelinedConfig):
        pieces.append(f"{strategy.num_microbatches} micro-batches")
        keys.append("strategy.num_microbatches")
    below = next((n for n in range(batch - 1, 0, -1) if microbatches(n)), None)
    above = next(n for n in itertools.count(batch + 1) if microbatches(n))
    near = f"{below} or {above}" if below else f"{above}"
    return (
        f"train.global_batch_size={batch}: cannot be cut evenly into {' x '.join(pieces)}; "
        f"set it to {near}, or change {' or '.join(keys)}"
    )

"""The strategies and grids among which to choose, as overrides. Planning refuses those that are impossible."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from orchestrator.planning.schedules import SCHEDULES

StrategyName = Literal[
    "single",
    "ddp",
    "dp",
    "fsdp",
    "hsdp",
    "model_parallel",
    "pipeline",
    "ddp_pipeline",
    "fsdp_pipeline",
    "parameter_server",
]

MICROBATCHES_PER_STAGE = (1, 2, 4)


def worker_counts(num_workers: int) -> tuple[int, ...]:
    """Return the numbers of workers to consider, in ascending order: the powers of two, and ``num_workers``."""
    powers = [2**i for i in range(num_workers.bit_length()) if 2**i < num_workers]
    return (*powers, num_workers)


def server_counts(num_workers: int) -> tuple[int, ...]:
    """Return the numbers of parameter servers to consider for ``num_workers``, in ascending order."""
    return worker_counts(num_workers // 2)


def stage_counts(num_workers: int, schedules: Sequence[str]) -> tuple[int, ...]:
    """Return the numbers of stages that the proposals have, in ascending order."""
    per_worker = {1, *(SCHEDULES[schedule].stages_per_rank for schedule in schedules)}
    return tuple(sorted({n * each for n in worker_counts(num_workers) if n > 1 for each in per_worker}))


def proposals(
    num_workers: int, strategies: Sequence[StrategyName], schedules: Sequence[str]
) -> Iterator[tuple[str, ...]]:
    """Yield the overrides of each proposal: the strategy, its workers, and its shards, micro-batches or servers.

    Args:
        num_workers: the largest number of workers. Servers come in addition, one for two workers at most.
        strategies: the strategies to propose.
        schedules: the schedules of pipelines to propose.
    """
    several = [n for n in worker_counts(num_workers) if n > 1]
    grids = [(n, p) for n in several for p in several if p < n and n % p == 0]
    for strategy in strategies:
        if strategy == "single":
            yield ("strategy=single",)
        elif strategy in ("ddp", "fsdp", "model_parallel"):
            yield from ((f"strategy={strategy}", f"strategy.num_workers={n}") for n in several)
        elif strategy == "dp" and several:
            yield ("strategy=dp", f"strategy.num_workers={num_workers}")
        elif strategy == "pipeline":
            for n in several:
                yield from (
                    ("strategy=pipeline", f"strategy.num_workers={n}", *stages) for stages in _stages(n, schedules)
                )
        elif strategy == "hsdp":
            for n, p in grids:
                yield "strategy=hsdp", f"strategy.num_workers={n}", f"strategy.shard_size={p}"
        elif strategy in ("ddp_pipeline", "fsdp_pipeline"):
            for n, p in grids:
                grid = (f"strategy={strategy}", f"strategy.num_workers={n}", f"strategy.pipeline_parallel_size={p}")
                yield from ((*grid, *stages) for stages in _stages(p, schedules))
        elif strategy == "parameter_server":
            for n in several:
                servers = ("strategy=parameter_server", f"strategy.num_workers={n}")
                yield from ((*servers, f"strategy.num_shards={count}") for count in server_counts(n))


def _stages(workers: int, schedules: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield each schedule with each number of micro-batches, from one for each stage upward."""
    for schedule in schedules:
        num_stages = workers * SCHEDULES[schedule].stages_per_rank
        for factor in MICROBATCHES_PER_STAGE:
            yield f"strategy.schedule={schedule}", f"strategy.num_microbatches={factor * num_stages}"

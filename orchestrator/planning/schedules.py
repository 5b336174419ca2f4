"""Pipeline schedules: their rules for stages and micro-batches. Imports no torch.

``torch.distributed.pipelining`` executes them. Sources: GPipe (Huang et al. 2019), 1F1B and
Interleaved1F1B (Narayanan et al. 2021), LoopedBFS (Lamy-Poirier 2022), InterleavedZeroBubble and
ZBVZeroBubble (Qi et al. 2023), DualPipeV (DeepSeek-AI 2024).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The rules of a schedule, for ``p`` = ``pipeline_parallel_size``.

    Attributes:
        name: the name in ``torch.distributed.pipelining`` and in ``strategy.schedule``.
        stages_per_rank: the required number of stages on each rank; the minimum if ``more_stages``.
        more_stages: whether a rank may have more stages.
        v_shaped: whether rank r has the stages r and 2p - 1 - r, which puts the loss on rank 0. Otherwise rank r has
            the stages r, r + p, r + 2p, ...
        least_microbatches: the minimum number of micro-batches: one, or as many as stages.
        whole_rounds: whether micro-batches run in rounds of equal size, about ``p`` each.
        splits_backward: whether it computes gradients of activations and of parameters at different times.
    """

    name: str
    stages_per_rank: int
    more_stages: bool = False
    v_shaped: bool = False
    least_microbatches: Literal["one", "stages"] = "one"
    whole_rounds: bool = False
    splits_backward: bool = False

    def stage_ranks(self, num_stages: int, pipeline_parallel_size: int) -> tuple[int, ...]:
        """Return the ``pp_rank`` of each stage."""
        p = pipeline_parallel_size
        if self.v_shaped:
            return (*range(p), *reversed(range(p)))
        rounds, rest = divmod(num_stages, p)
        return (*range(p),) * rounds + (*range(rest),)

    def microbatches_error(self, num_microbatches: int, num_stages: int, pipeline_parallel_size: int) -> str | None:
        """Return why this number of micro-batches is impossible, with a remedy; None if it is possible."""
        if self.least_microbatches == "stages" and num_microbatches < num_stages:
            remedy = f"set it to {num_stages} or more, or use strategy.schedule=GPipe"
            return f"{self.name} needs at least one per stage; {remedy}"
        rounds = max(1, num_microbatches // pipeline_parallel_size)
        if self.whole_rounds and num_microbatches % rounds:
            return f"{self.name} needs a multiple of {pipeline_parallel_size}, the number of workers of a pipeline"
        return None

    def choose_microbatches(self, samples: Iterable[int], num_stages: int, pipeline_parallel_size: int) -> int | None:
        """Choose the number of micro-batches: the smallest from two per stage upward, or else the largest below.

        Args:
            samples: the number of samples in a slice, for each size of slice that occurs.
            num_stages: the number of stages in the whole pipeline.
            pipeline_parallel_size: the number of workers of a pipeline.

        Returns:
            A number that divides each of ``samples`` and keeps the rules of the schedule; None if there is none.
        """
        common, chosen = math.gcd(*samples), None
        for m in _divisors(common):
            if not self.microbatches_error(m, num_stages, pipeline_parallel_size):
                chosen = m
                if m >= 2 * num_stages:
                    break
        return chosen


@functools.cache
def _divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of a positive number in ascending order."""
    low = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return tuple(sorted({*low, *(number // d for d in low)}))


SCHEDULES = {
    schedule.name: schedule
    for schedule in (
        Schedule(name="GPipe", stages_per_rank=1),
        Schedule(name="1F1B", stages_per_rank=1, least_microbatches="stages"),
        Schedule(name="Interleaved1F1B", stages_per_rank=2, more_stages=True, whole_rounds=True),
        Schedule(name="LoopedBFS", stages_per_rank=2, more_stages=True),
        Schedule(
            name="InterleavedZeroBubble", stages_per_rank=2, more_stages=True, whole_rounds=True, splits_backward=True
        ),
        Schedule(name="ZBVZeroBubble", stages_per_rank=2, v_shaped=True, splits_backward=True),
        Schedule(name="DualPipeV", stages_per_rank=2, v_shaped=True, least_microbatches="stages", splits_backward=True),
    )
}


@dataclass(frozen=True, kw_only=True)
class PipelineLayout:
    """The stages of a model and its micro-batches. ``stage_ranks`` is the ``pp_rank`` of each stage."""

    schedule: str
    num_stages: int
    num_microbatches: int
    stage_ranks: tuple[int, ...]

    def stages_of(self, pp_rank: int) -> tuple[int, ...]:
        """Return the stages on the workers at position ``pp_rank``."""
        return self.stages_by_rank().get(pp_rank, ())

    def stages_by_rank(self) -> Mapping[int, tuple[int, ...]]:
        """Return the stages on the workers at each position, by ``pp_rank``."""
        stages: dict[int, tuple[int, ...]] = {}
        for stage, rank in enumerate(self.stage_ranks):
            stages[rank] = (*stages.get(rank, ()), stage)
        return stages

"""Pipeline schedules: their rules for stages and micro-batches, and how large these should be. Imports no torch.

``torch.distributed.pipelining`` executes them. Sources: GPipe (Huang et al. 2019), 1F1B and
Interleaved1F1B (Narayanan et al. 2021), LoopedBFS (Lamy-Poirier 2022), InterleavedZeroBubble and
ZBVZeroBubble (Qi et al. 2023), DualPipeV (DeepSeek-AI 2024).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from orchestrator.planning.plan import Plan


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
        for m in divisors(common):
            if not self.microbatches_error(m, num_stages, pipeline_parallel_size):
                chosen = m
                if m >= 2 * num_stages:
                    break
        return chosen


@functools.cache
def divisors(number: int) -> tuple[int, ...]:
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


LARGE_OVERHEAD = 0.25
SMALL_OVERHEAD = 0.1
"""Time besides computation, relative to computation: larger micro-batches are worth it above the first, and the size is
chosen for the second."""

MOST_GROWTH = 64
"""Only a larger model helps micro-batches that would have to grow more."""

PASS_OVERHEAD_MS = 1.0
CORE_FLOPS_PER_S = 60e9
"""What a pass of a stage over a micro-batch costs besides its arithmetic, and the arithmetic of a core in a second.

Both are orders of magnitude. The step times of ``benchmarks/results/auto.md`` give 0.9 to 1.3 ms for the small models,
and from 28 (``resnet50``) to 98 GFLOP/s (the larger ``gpt``).
"""

FORWARDS_PER_PASS = 1.5
"""The mean of a forward pass and of a backward pass, which takes twice as long."""


def growth(overhead: float) -> int:
    """Return how many times larger micro-batches should be for their overhead to be small; 1 if they are large enough.

    The overhead stays for a larger micro-batch, and computation grows with it.

    Args:
        overhead: the time that is no computation, relative to computation.

    Returns:
        A power of two.
    """
    return 1 if overhead < LARGE_OVERHEAD else 2 ** math.ceil(math.log2(overhead / SMALL_OVERHEAD))


def remedy(factor: int, larger_batch: str) -> str:
    """Return what makes micro-batches ``factor`` times larger. ``larger_batch``: the override that does."""
    return f"{larger_batch}, or a larger model" if factor <= MOST_GROWTH else "a larger model"


def note_on_size(plan: Plan, forward_flops: float) -> str | None:
    """Return a note if the micro-batches of a pipeline on CPUs are likely too small.

    Args:
        forward_flops: the floating-point operations of the whole model's forward pass over one micro-batch.

    Returns:
        None if they are large enough, or if it cannot be estimated.
    """
    layout = plan.pipeline
    if plan.device != "cpu" or layout is None or layout.num_microbatches == 1 or not forward_flops:
        return None
    flops_per_s = CORE_FLOPS_PER_S * plan.threads_per_worker
    pass_ms = FORWARDS_PER_PASS * forward_flops / layout.num_stages / flops_per_s * 1e3
    factor = growth(PASS_OVERHEAD_MS / pass_ms)
    if factor == 1:
        return None
    rows = plan.microbatch_rows
    return (
        f"micro-batches of {rows} {'sample' if rows == 1 else 'samples'} are likely too small: a pass of a stage takes "
        f"about {pass_ms:.1g} ms of computation and {PASS_OVERHEAD_MS:g} ms of overhead; "
        f"try {remedy(factor, f'train.global_batch_size={factor * plan.global_batch_size}')}"
    )

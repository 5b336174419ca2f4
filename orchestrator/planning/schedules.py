"""Pipeline schedules by name, the rules they ask the plan to keep, and what the plan decides. Pure, no torch.

``torch.distributed.pipelining`` carries them out. Sources: GPipe (Huang et al. 2019), 1F1B and
Interleaved1F1B (Narayanan et al. 2021), LoopedBFS (Lamy-Poirier 2022), InterleavedZeroBubble and
ZBVZeroBubble (Qi et al. 2023), DualPipeV (DeepSeek-AI 2024).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """``stages_per_rank``: the number it needs, or the least it can have where ``more_stages``.

    ``v_shaped``: rank r has stages r and 2p - 1 - r, so that the loss is on rank 0; otherwise stages
    r, r + p, r + 2p, ...
    """

    name: str
    stages_per_rank: int
    more_stages: bool = False
    v_shaped: bool = False
    least_microbatches: Literal["one", "stages"] = "one"
    whole_rounds: bool = False

    def stage_ranks(self, num_stages: int, pipeline_parallel_size: int) -> tuple[int, ...]:
        """The ``pp_rank`` of each stage."""
        p = pipeline_parallel_size
        if self.v_shaped:
            return (*range(p), *reversed(range(p)))
        return tuple(stage % p for stage in range(num_stages))

    def microbatches_error(self, num_microbatches: int, num_stages: int, pipeline_parallel_size: int) -> str | None:
        """Why this number of micro-batches is not possible, with the remedy; None if it is."""
        if self.least_microbatches == "stages" and num_microbatches < num_stages:
            return f"{self.name} needs at least one per stage; set it to {num_stages} or more, or use GPipe"
        rounds = max(1, num_microbatches // pipeline_parallel_size)
        if self.whole_rounds and num_microbatches % rounds:
            return f"{self.name} needs a multiple of {pipeline_parallel_size}, one for each worker of a pipeline"
        return None

    def choose_microbatches(self, samples: Iterable[int], num_stages: int, pipeline_parallel_size: int) -> int | None:
        """The number nearest above two per stage, or the largest below it, that divides each of ``samples``
        (those of a replica's slice) and keeps the rules; None: there is none."""
        common, chosen = math.gcd(*samples), None
        for m in range(1, common + 1):
            if common % m == 0 and not self.microbatches_error(m, num_stages, pipeline_parallel_size):
                chosen = m
                if m >= 2 * num_stages:
                    break
        return chosen


SCHEDULES = {
    schedule.name: schedule
    for schedule in (
        Schedule(name="GPipe", stages_per_rank=1),
        Schedule(name="1F1B", stages_per_rank=1, least_microbatches="stages"),
        Schedule(name="Interleaved1F1B", stages_per_rank=2, more_stages=True, whole_rounds=True),
        Schedule(name="LoopedBFS", stages_per_rank=2, more_stages=True),
        Schedule(name="InterleavedZeroBubble", stages_per_rank=2, more_stages=True, whole_rounds=True),
        Schedule(name="ZBVZeroBubble", stages_per_rank=2, v_shaped=True),
        Schedule(name="DualPipeV", stages_per_rank=2, v_shaped=True, least_microbatches="stages"),
    )
}


@dataclass(frozen=True, kw_only=True)
class PipelineLayout:
    """How a model is cut and worked through. ``stage_ranks``: the ``pp_rank`` of each stage."""

    schedule: str
    num_stages: int
    num_microbatches: int
    stage_ranks: tuple[int, ...]

    def stages_of(self, pp_rank: int) -> tuple[int, ...]:
        return tuple(stage for stage, rank in enumerate(self.stage_ranks) if rank == pp_rank)

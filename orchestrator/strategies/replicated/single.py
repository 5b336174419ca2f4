"""``single``: the whole model on one worker, without communication. The baseline of every comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from orchestrator.config.schema import StrategyConfig
from orchestrator.job import Job, has_training_step
from orchestrator.strategies.base import Context, Strategy
from orchestrator.strategies.registry import register
from orchestrator.strategies.replicated.job_step import JobStep
from orchestrator.strategies.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class SingleConfig(StrategyConfig):
    """The keys of ``single``. Raises ValueError unless ``num_workers`` is 1 or auto."""

    name: Literal["single"]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_workers not in (1, "auto"):
            raise ValueError(
                f"strategy.num_workers={self.num_workers}: strategy=single has one worker; use strategy=ddp for more"
            )


@register("single")
class Single(Trainer):
    """The whole model on one worker."""

    config_class: ClassVar[type[StrategyConfig]] = SingleConfig
    runs_training_step = True

    @classmethod
    def create(cls, context: Context, job: Job) -> Strategy:
        return JobStep(context, job) if has_training_step(job) else cls(context, job)

    @classmethod
    def default_num_workers(cls, options: StrategyConfig, *, gpus: Sequence[int], spares: int) -> int:
        return 1

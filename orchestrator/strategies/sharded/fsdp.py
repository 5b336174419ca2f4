"""``fsdp``: each worker keeps a part of every parameter, of its gradient and of its optimizer state.

The blocks of the model are gathered one after another, in the forward and again in the backward pass, and freed after
it; gradients are summed into the parts. Rajbhandari et al., SC 2020, "ZeRO"; Zhao et al., VLDB 2023, "PyTorch FSDP".
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset

from orchestrator.config.schema import Config, StrategyConfig, option
from orchestrator.job import Job
from orchestrator.model.modes import note_on_dropout
from orchestrator.model.partial_init import build_fake
from orchestrator.planning.layout import Layout
from orchestrator.planning.mesh import Mesh
from orchestrator.planning.plan import Plan
from orchestrator.protocol.messages import RecoverableSteps
from orchestrator.state.merge import merge, without_copies
from orchestrator.state.train_state import TrainState
from orchestrator.state.transport import CPU, broadcast_state, broadcast_tensors, gather_states
from orchestrator.strategies.base import Context
from orchestrator.strategies.constructor import constructor_of
from orchestrator.strategies.gradients import norm_over, sum_over
from orchestrator.strategies.job_optimizer import optimizer_of_part
from orchestrator.strategies.reduction import Reduction, Weight, weight_sum
from orchestrator.strategies.registry import register
from orchestrator.strategies.sharded.preflight import check_shards
from orchestrator.strategies.sharded.sharded_model import ShardedModel
from orchestrator.strategies.trained import Trained
from orchestrator.strategies.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class FSDPConfig(StrategyConfig):
    """The keys of ``fsdp``."""

    name: Literal["fsdp"]
    wrap: Literal["auto"] | tuple[str, ...] = option(
        "modules that are gathered one by one; auto: the repeated blocks of the model; or the names of their classes, "
        "as in [Block]"
    )
    reshard_after_forward: bool = option(
        "free what the forward pass has gathered, and gather it again in the backward pass; false: keep it up to the "
        "end of the step, which takes memory for the whole model"
    )


@register("fsdp")
class FSDP(Trainer):
    """A part of each tensor of the model on every worker."""

    config_class: ClassVar[type[StrategyConfig]] = FSDPConfig
    evaluates_padding = True
    passes: ShardedModel

    @classmethod
    def plan_layout(cls, config: Config, num_workers: int, errors: list[str]) -> Layout:
        if num_workers < 2:
            errors.append(
                f"strategy.num_workers={num_workers}: strategy=fsdp divides the model over at least 2 workers; use "
                "strategy=single for one"
            )
        return Layout(mesh=Mesh(shard=num_workers))

    @classmethod
    def check_job(cls, config: Config, job: Job, plan: Plan, errors: list[str]) -> tuple[str, ...]:
        options = config.strategy
        assert isinstance(options, FSDPConfig)
        notes = super().check_job(config, job, plan, errors)
        return (*notes, *check_shards(config, job, plan, options.wrap, errors))

    @classmethod
    def why_not_compiled(cls, plan: Plan) -> str | None:
        return "its modules gather their parameters between compiled code; set it to false"

    def setup(self, train_set: Dataset[Any]) -> None:
        self._train_set: Dataset[Any] = train_set
        self.passes = ShardedModel(self.job, self.context, self.precision, wrap=_options(self.context).wrap)
        note = note_on_dropout(self.passes.model)
        self._warnings = () if note is None else (note,)

    def attach(self) -> None:
        """Divide the model, once: a later generation is another object, because it begins from a checkpoint."""
        context, passes = self.context, self.passes
        passes.divide(_world(), keep_whole=not _options(context).reshard_after_forward)
        whole = build_fake(constructor_of(self.job, context.train, self.precision), CPU).model
        optimizer = optimizer_of_part(self.job, whole, passes.module())
        self.trained = Trained(
            self.job,
            context,
            [passes.model],
            {"": optimizer},
            self._train_set,
            module=passes.module,
            boxes=passes.boxes,
        )
        self.reduction = InParts(passes, self.trained, context)

    def sync_initial_state(self) -> None:
        """Give all ranks the buffers of rank 0. The parts of the parameters have the values of one seed."""
        broadcast_tensors(self.trained.buffers, source=0, device=self.context.device)

    @property
    def full_model(self) -> None:
        """No rank has it."""

    @property
    def writers(self) -> Sequence[int]:
        return range(self.context.mesh.world_size)

    @property
    def saved_names(self) -> Sequence[str]:
        return self.passes.saved_names

    def capture(self, *, step: int, samples_consumed: int, into: TrainState | None) -> TrainState | None:
        states = gather_states(
            self.capture_part(step=step, samples_consumed=samples_consumed, into=into),
            ranks=self.writers,
            rank=self.context.global_rank,
            device=self.context.device,
            into=None,
        )
        return None if states is None else merge(states, order=self.saved_names)

    def capture_part(self, *, step: int, samples_consumed: int, into: TrainState | None) -> TrainState:
        state = self.trained.snapshot(step=step, samples_consumed=samples_consumed, into=into)
        return state if self.context.global_rank == 0 else without_copies(state)

    def restore_part(self, state: TrainState) -> dict[str, Any]:
        self.load(state)
        return state.meta

    def restore(self, state: TrainState | None, *, source: int) -> dict[str, Any]:
        context, boxes = self.context, self.passes.boxes
        return self.restore_part(
            broadcast_state(state, source=source, rank=context.global_rank, device=context.device, boxes=boxes)
        )

    def recoverable_steps(self, step: int) -> RecoverableSteps:
        """Return nothing: only checkpoints have the parts of a rank that is lost."""
        return {}

    def close(self) -> None:
        if hasattr(self, "passes"):  # otherwise setup() has failed
            self.passes.close()


class InParts(Reduction):
    """Gradients are summed while they are divided, in the backward passes."""

    def __init__(self, passes: ShardedModel, trained: Trained, context: Context):
        self._passes = passes
        self._trained = trained
        self._context = context

    def total_weight(self, own: Weight, *, counts_samples: bool) -> Weight:
        context = self._context
        return context.train.global_batch_size if counts_samples else weight_sum(own, device=context.device)

    def around_slice(self, *, last: bool) -> contextlib.AbstractContextManager[None]:
        return self._passes.around_slice(last=last)

    def finish(self) -> None:
        self._passes.take_gradients()
        sum_over(_world(), [scalar.grad for scalar in self._passes.scalars if scalar.grad is not None])
        broadcast_tensors(self._trained.buffers, source=0, device=self._context.device)

    def norm(self, parameters: Sequence[Tensor], device: torch.device) -> Tensor:
        ranks, scalars = self._context.mesh.world_size, {*self._passes.scalars}
        return norm_over(_world(), parameters, device, lambda parameter: ranks if parameter in scalars else 1)


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def _options(context: Context) -> FSDPConfig:
    assert isinstance(context.options, FSDPConfig)
    return context.options

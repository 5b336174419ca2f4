"""``fsdp``: each worker keeps a shard of every parameter, of its gradient and of its optimizer state.

The blocks of the model are gathered one after another, in the forward and again in the backward pass, and freed after
it; gradients are summed into the shards. Rajbhandari et al., SC 2020, "ZeRO"; Zhao et al., VLDB 2023, "PyTorch FSDP".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

from orchestrator.config.schema import Config
from orchestrator.job import Job
from orchestrator.model.modes import evaluation_mode
from orchestrator.model.partial_init import build_fake
from orchestrator.model.precision import Precision, gathered_share
from orchestrator.model.stages import module_of
from orchestrator.planning.mesh import DENSE, TOKENS, Mesh
from orchestrator.planning.plan import Plan
from orchestrator.protocol.metrics import MetricSpec, wait_metric
from orchestrator.state.transport import CPU
from orchestrator.strategies.constructor import Outline, constructor_of
from orchestrator.strategies.data.batch_parts import BatchDivision
from orchestrator.strategies.groups import MeshGroups
from orchestrator.strategies.keys import ShardedConfig
from orchestrator.strategies.measure.device import WaitTimer
from orchestrator.strategies.measure.job_metrics import EvalSums, Measure
from orchestrator.strategies.owner import Own
from orchestrator.strategies.part_trainer import PartTrainer
from orchestrator.strategies.rank_context import Context
from orchestrator.strategies.reduction import Reduction
from orchestrator.strategies.sharded.divided_model import DividedModel
from orchestrator.strategies.sharded.rehearsal import check_forward
from orchestrator.strategies.sharded.shard_options import check_shards, gathered_at_once
from orchestrator.strategies.sums.into_shards import IntoShards
from orchestrator.strategies.sums.mesh_reduction import MeshReduction
from orchestrator.strategies.trained import Trained
from orchestrator.strategies.transforms.blocks import compile_in_place
from orchestrator.strategies.transforms.every import check_parts
from orchestrator.strategies.whole_model import WholeModel

ALL_GATHER_MS, REDUCE_SCATTER_MS = wait_metric("all_gather"), wait_metric("reduce_scatter")


class ShardedModel(WholeModel):
    """The model, of whose parameters this rank has a shard. They are gathered group by group while they are used.

    Attributes:
        divided: the parts.
        saved_names: the names of all tensors of a checkpoint.
    """

    def __init__(self, job: Job, context: Context, precision: Precision, divided: DividedModel):
        """Prepare for passes through the model of ``divided``."""
        self.job = job
        self.precision = precision
        self._device = context.device
        self._train = context.train
        self.divided = divided
        self.model = self.divided.model
        self.saved_names = tuple(self.model.state_dict())

    def divide(self, group: dist.ProcessGroup) -> None:
        """Divide the model over the ranks of ``group``. After :meth:`close`, it may be divided again, over others."""
        self.model = self.divided.renewed()
        compile_in_place(self.model, self._train)
        self.forward_model = self.unwrapped
        self.divided.divide(self.forward_model, group)

    def evaluate(self, batch: tuple[Any, Any], valid: int, measure: Measure) -> EvalSums:
        """Compute what :class:`WholeModel` does, also of no samples, because all ranks gather together."""
        self.divided.wrapped.gather_all()
        try:
            if valid > 0:
                return super().evaluate(batch, valid, measure)
            with evaluation_mode(self.model), torch.no_grad(), self.precision.autocast():
                self.evaluated(batch[0])
            zero = torch.zeros((), device=self._device)
            return EvalSums(loss_sum=zero, weight=torch.zeros(()), metrics={})
        finally:
            self.divided.wrapped.free()  # updates and averages change the parts, not what has been gathered

    def forward(self, inputs: Any) -> Any:
        """Return the output for training."""
        try:
            return self.forward_model(inputs)
        except RuntimeError as e:
            if "mixed torch.Tensor and DTensor" not in str(e):
                raise
            raise ValueError(
                "strategy.wrap: the model uses parameters of a module that does not run itself, so that they are not "
                "gathered; the log shows where. Set strategy.reshard_after_forward=false, with which the whole model "
                f"is gathered for each step, or use strategy=ddp: {e}"
            ) from e

    def evaluated(self, inputs: Any) -> Any:
        """Return the output for an evaluation."""
        return self.forward(inputs)

    def module(self) -> nn.Module:
        """Return a bare module with this rank's shards, and the buffers that are saved, under the model's own names."""
        parts = self.divided.parts
        return module_of({n: parts[n] if n in parts else self.model.get_buffer(n) for n in self.saved_names})

    def close(self) -> None:
        """Release everything that refers to the process group. It cannot run then; shards and buffers remain."""
        self.divided.close()


class FSDP(PartTrainer):
    """A shard of each tensor of the model on every worker, and replicas of the shards if the mesh has them."""

    divides_model = True
    moves_parameters = True
    evaluates_padding = True
    passes: ShardedModel

    @classmethod
    def check_job(cls, config: Config, outline: Outline, plan: Plan, errors: list[str]) -> tuple[str, ...]:
        notes = super().check_job(config, outline, plan, errors)
        notes = (*notes, *check_shards(config, outline, plan, errors))
        return (*notes, *check_parts(config, outline, plan, errors))

    @classmethod
    def gathered_bytes(cls, config: Config, mesh: Mesh, model: nn.Module) -> float:
        share = gathered_share(model, Precision.named(config.train.precision, "cpu").autocast_dtype)
        return gathered_at_once(ShardedConfig.of(config.strategy), model, share=share)

    def setup(self, train_set: Dataset[Any]) -> None:
        self._train_set: Dataset[Any] | None = train_set  # until the first attach()
        self.find_parts(train_set)
        divided = DividedModel(self.constructor(), self.context, self.precision, placed=self.placement)
        self.passes = ShardedModel(self.job_of_part, self.context, self.precision, divided)
        self._warnings = self.notes_on(self.passes.model, train_set)

    def warning_about(self, division: BatchDivision, model: nn.Module, train_set: Dataset[Any]) -> str | None:
        return self.warning_of_whole(division, model, train_set)

    def attach(self) -> None:
        """Divide the model over the process groups of this generation."""
        context, passes = self.context, self.passes
        groups = MeshGroups(context)
        shards = groups.over(*DENSE)
        assert shards is not None
        if self._train_set is not None:
            self.trained = self._trained(self._train_set)
            self._train_set = None
        super().attach()  # frees gradients before the model is divided
        self.parts.connect(groups.over, context.device)
        passes.divide(shards)
        self.trained.use([passes.model])
        tokens, _ = groups.over(*TOKENS), groups.over("replicate")  # formed here, on all ranks
        assert tokens is not None
        sums = IntoShards(passes.divided, tokens, at_end=False)
        self.reduction = MeshReduction(context, self.trained, groups, sums, owner=self.owner)

    def _trained(self, train_set: Dataset[Any]) -> Trained:
        context, passes = self.context, self.passes
        whole = build_fake(constructor_of(self.job, context.train, self.precision), CPU)
        owner = Own(passes.module, passes.divided.placements)
        trained = self.trained_part([passes.model], owner, train_set, whole=whole.model)
        passes.divided.calls = check_forward(
            self.job, whole, train_set, precision=self.precision, options=ShardedConfig.of(context.options)
        )
        return trained

    @property
    def timers(self) -> Mapping[MetricSpec, WaitTimer]:
        divided = self.passes.divided
        return {ALL_GATHER_MS: divided.gathers, REDUCE_SCATTER_MS: divided.scatters, **super().timers}

    @property
    def saved_names(self) -> Sequence[str]:
        return self.passes.saved_names

    def close(self) -> None:
        if hasattr(self, "passes"):  # otherwise setup() has failed
            self.passes.close()
            self.reduction = Reduction()
        super().close()

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
from torch.optim import Optimizer
from torch.utils.data import Dataset

from orchestrator.job import Job
from orchestrator.model.modes import evaluation_mode
from orchestrator.model.partial_init import build_fake
from orchestrator.model.precision import Precision
from orchestrator.model.stages.own_stages import module_of
from orchestrator.planning.mesh import DENSE, TOKENS
from orchestrator.planning.placement import Placement
from orchestrator.protocol.metrics import MetricSpec, wait_metric
from orchestrator.state.transport import CPU
from orchestrator.strategies.constructor import constructor_of
from orchestrator.strategies.groups import MeshGroups
from orchestrator.strategies.keys import MeshConfig
from orchestrator.strategies.measure.device import WaitTimer
from orchestrator.strategies.measure.job_metrics import EvalSums, Measure
from orchestrator.strategies.owner import Own
from orchestrator.strategies.parts.divided_model import DividedModel, IntoShards
from orchestrator.strategies.parts.part import ModelPart
from orchestrator.strategies.parts.rehearsal import check_forward
from orchestrator.strategies.rank_context import Context
from orchestrator.strategies.sums.sums import Sums
from orchestrator.strategies.trained import Trained
from orchestrator.strategies.transforms.blocks import compile_in_place
from orchestrator.strategies.transforms.part import Parts
from orchestrator.strategies.update.job_optimizer import optimizer_of_part
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


class Gathered(ModelPart):
    """A shard of each tensor of the model, or of its parts."""

    is_built_alone = False
    passes: ShardedModel

    def setup(self, context: Context, parts: Parts, train_set: Dataset[Any]) -> None:
        super().setup(context, parts, train_set)
        build = parts.of(constructor_of(self.job, context.train, self.precision))
        divided = DividedModel(build, context, self.precision, placed=parts.placement)
        self.passes = ShardedModel(self.job_of_part, context, self.precision, divided)
        self._train_set: Dataset[Any] | None = train_set  # until the optimizer is made
        self._options = MeshConfig.of(context.options)

    def module(self) -> nn.Module:
        return self.passes.module()

    @property
    def outline(self) -> nn.Module:
        return self.passes.model

    @property
    def saved_names(self) -> Sequence[str]:
        return self.passes.saved_names

    def placements(self) -> Mapping[str, Placement]:
        return self.passes.divided.placements

    def optimizer(self, owner: Own) -> Optimizer:
        whole = build_fake(constructor_of(self.job, self._train, self.precision), CPU)
        optimizer = optimizer_of_part(self.job, whole.model, owner.module())
        assert self._train_set is not None
        self.passes.divided.calls = check_forward(
            self.job, whole, self._train_set, precision=self.precision, options=self._options
        )
        self._train_set = None
        return optimizer

    def divide(self, context: Context, groups: MeshGroups, trained: Trained) -> None:
        shards = groups.over(*DENSE)
        assert shards is not None
        self.passes.divide(shards)
        trained.use([self.passes.model])

    def sums(self, context: Context, groups: MeshGroups, owner: Own) -> Sums:
        tokens, _ = groups.over(*TOKENS), groups.over("replicate")  # formed here, on all ranks
        assert tokens is not None
        return IntoShards(self.passes.divided, tokens, at_end=False)

    @property
    def timers(self) -> Mapping[MetricSpec, WaitTimer]:
        return {ALL_GATHER_MS: self.passes.divided.gathers, REDUCE_SCATTER_MS: self.passes.divided.scatters}

    def close(self) -> None:
        if hasattr(self, "passes"):  # otherwise setup() has failed
            self.passes.close()

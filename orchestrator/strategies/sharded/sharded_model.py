"""A model whose parameters are divided over ranks, and the passes of batches through it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from orchestrator.job import Job
from orchestrator.model.modes import evaluation_mode
from orchestrator.model.precision import Precision
from orchestrator.model.stages import module_of
from orchestrator.strategies.measure.job_metrics import EvalSums, Measure
from orchestrator.strategies.rank_context import Context
from orchestrator.strategies.sharded.divided_model import DividedModel
from orchestrator.strategies.transforms.blocks import compile_in_place
from orchestrator.strategies.whole_model import WholeModel


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

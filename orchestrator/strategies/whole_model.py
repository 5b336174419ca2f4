"""The whole model on each worker: the passes of ``single``, ``ddp``, ``dp`` and the asynchronous strategies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from orchestrator.compat.generators import seed_generators
from orchestrator.config.schema import TrainConfig
from orchestrator.job import Job
from orchestrator.model.batch import first_rows, num_rows
from orchestrator.model.modes import evaluation_mode
from orchestrator.model.precision import Precision, summable
from orchestrator.planning.mesh import even_shares
from orchestrator.strategies.constructor import constructor_of
from orchestrator.strategies.data.batch_parts import LossOfParts, mean_loss
from orchestrator.strategies.data.datasets import is_ragged
from orchestrator.strategies.measure.job_metrics import BatchMetrics, EvalSums, Measure, loss_of
from orchestrator.strategies.rank_context import Context
from orchestrator.strategies.reduction import Reduction, Weight, weighted, without_gradient
from orchestrator.strategies.training_step import models_of
from orchestrator.strategies.transforms.blocks import compile_in_place


class Passes(Protocol):
    """The passes of one rank: ``WholeModel``, or a ``Chain`` of stages."""

    def backward(
        self, slices: Sequence[Any], reduction: Reduction, metrics: BatchMetrics, *, context: Context, factor: float
    ) -> tuple[Tensor, Weight]:
        """Add the gradients of the slices of this rank's share of a batch; see ``WholeModel.backward``."""

    def evaluate(self, batch: tuple[Any, Any], valid: int, measure: Measure) -> EvalSums:
        """Compute loss and metrics of the first ``valid`` samples of a batch."""


class WholeModel:
    """The model, the loss, and the passes through both.

    Attributes:
        forward_model: what is called with a batch's input in training.
    """

    def __init__(self, job: Job, context: Context, precision: Precision, *, model: nn.Module | None = None):
        """Build the model, with the same initial values on every rank, unless it is given."""
        self.job = job
        self.precision = precision
        self._device = context.device
        if model is None:
            seed_generators(context.seed)
            model = constructor_of(job, context.train, precision)().to(context.device)
        self.model = model
        self.forward_model: nn.Module = self.unwrapped

    def compile(self, train: TrainConfig) -> None:
        """Compile the model, if ``train`` asks for it."""
        for model in models_of(self.model).values():
            # Inside of DistributedDataParallel, so that an evaluation runs compiled code too. The compiler knows of the
            # buckets and cuts the backward pass at them.
            compile_in_place(model, train)

    @property
    def unwrapped(self) -> nn.Module:
        """A module that is called with a batch's input: the model, unless the job overrides ``forward``."""
        return self.model if type(self.job).forward is Job.forward else _JobForward(self.job, self.model)

    def backward(
        self, slices: Sequence[Any], reduction: Reduction, metrics: BatchMetrics, *, context: Context, factor: float
    ) -> tuple[Tensor, Weight]:
        """Add the gradients of the loss, each part of which counts by its share of the weight of the global batch.

        Args:
            slices: the slices of this rank's share of the batch, as pairs of inputs and targets on the device.
            reduction: weighs the parts, and is told of each.
            metrics: receives the metrics of each part.
            factor: what the loss is multiplied by.

        Returns:
            The summed loss of this rank, a scalar on the device, and its weight; 0 without the loss.
        """
        train = context.train
        share = even_shares(train.global_batch_size, context.mesh.data_parallel_size)[context.dp_rank]
        rows = even_shares(share, train.grad_accumulation)
        weights, total = reduction.weigh(self.job, [target for _, target in slices], rows)
        divisor = total / factor
        loss_sum = torch.zeros((), device=self._device)
        for i, ((inputs, target), weight) in enumerate(zip(slices, weights, strict=True)):
            with reduction.around_slice(last=i == len(slices) - 1):
                with self.precision.autocast():
                    loss = self.mean_loss(inputs, target, weight, metrics)
                (summable(loss) * (weight / divisor)).backward()
            loss_sum = loss_sum + weighted(loss.detach(), weight)  # in float64 if the loss is
        return loss_sum, sum(weights)

    def evaluate(self, batch: tuple[Any, Any], valid: int, measure: Measure) -> EvalSums:
        """Compute the loss, and the metrics by ``measure``, of the first ``valid`` samples of a batch on the device."""
        rows = num_rows(batch)
        if rows is not None and valid < rows and not is_ragged(batch, rows):
            batch = first_rows(batch, valid)
        inputs, target = batch
        with evaluation_mode(self.model), torch.no_grad(), self.precision.autocast():
            output = self.precision.outputs(self.evaluated(inputs))
            weight = self.job.weight(target)
            weight = valid if weight is None else weight
            loss = weighted(self.loss(output, target), weight)
            metrics = measure(output, target)
        return EvalSums(loss_sum=loss, weight=torch.as_tensor(weight, dtype=torch.float32), metrics=metrics)

    def mean_loss(self, inputs: Any, target: Any, weight: Weight, metrics: BatchMetrics) -> Tensor:
        """Return the mean loss of a slice of that ``weight``, and add its metrics."""
        output = self.precision.outputs(self.forward(inputs))
        without_gradient(output, weight)
        loss = self.loss(output, target)
        metrics.add(metrics.of(output, target))
        return loss

    def forward(self, inputs: Any) -> Any:
        """Return the output for training."""
        return self.forward_model(inputs)

    def loss(self, output: Any, target: Any) -> Tensor:
        """Return the mean loss of an output."""
        return loss_of(self.job, output, target)

    def loss_of_parts(self, context: Context) -> LossOfParts:
        """Return the loss of a batch that is divided."""
        return mean_loss(self.job)

    def evaluated(self, inputs: Any) -> Any:
        """Return the output for an evaluation."""
        return self.job.forward(self.model, inputs)


class _JobForward(nn.Module):
    """``Job.forward`` as a module of one argument, for ``DistributedDataParallel``, which has to see each call."""

    def __init__(self, job: Job, model: nn.Module):
        super().__init__()
        self.job = job
        self.model = model

    def forward(self, inputs: Any) -> Any:
        return self.job.forward(self.model, inputs)

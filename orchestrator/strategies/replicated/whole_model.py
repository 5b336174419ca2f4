"""The whole model on each worker: the common part of ``single``, ``ddp``, ``dp`` and the asynchronous strategies.

Each rank has the model, the optimizer and the loss. This class does not communicate; subclasses exchange gradients or
parameters between ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from orchestrator.compat.generators import seed_generators
from orchestrator.config.schema import Config
from orchestrator.job import Job
from orchestrator.model.batch import first_rows, has_row_per_sample, num_rows
from orchestrator.model.modes import evaluation_mode, note_on_dropout
from orchestrator.model.precision import summable
from orchestrator.planning.mesh import even_shares
from orchestrator.planning.plan import Plan
from orchestrator.state.train_state import TrainState
from orchestrator.state.transport import CPU, broadcast_state
from orchestrator.strategies import registry
from orchestrator.strategies.base import EvalSums
from orchestrator.strategies.batch_parts import Division, LossOfParts, by_keys, mean_loss, warning_about_parts
from orchestrator.strategies.constructor import compile_in_place, constructor_of
from orchestrator.strategies.datasets import steps_per_epoch
from orchestrator.strategies.diverging import diverging_errors
from orchestrator.strategies.job_metrics import checked_metrics
from orchestrator.strategies.job_optimizer import optimizer_of
from orchestrator.strategies.optimizer_step import OptimizerStep
from orchestrator.strategies.replicated.sync_batchnorm import check_batchnorm
from orchestrator.strategies.training_step import models_of


class WholeModel(OptimizerStep):
    """A strategy that has the whole model, the optimizer and the loss on this worker."""

    @classmethod
    def check_job(cls, config: Config, job: Job, plan: Plan, errors: list[str]) -> tuple[str, ...]:
        errors += diverging_errors(job, plan)
        return check_batchnorm(job, plan, synchronized=False, errors=errors)

    def setup(self, train_set: Dataset[Any]) -> None:
        self._steps_per_epoch = steps_per_epoch(self.job, train_set, self.context.train.global_batch_size)
        seed_generators(self.context.seed)
        self.model = constructor_of(self.job, self.context.train, self.precision)().to(self.context.device)
        notes = (note_on_dropout(self.model), self._warning_about_parts(train_set))
        self._warnings = tuple(note for note in notes if note is not None)
        for model in models_of(self.model).values():
            # Inside of DistributedDataParallel, so that an evaluation runs compiled code too. The compiler knows of the
            # buckets and cuts the backward pass at them.
            compile_in_place(model, self.context.train)
        self.forward_model: nn.Module = forward_module(self.job, self.model)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self._set_up_optimizer()

    def setup_warnings(self) -> tuple[str, ...]:
        return self._warnings

    def evaluate(self, batch: Any, valid: int) -> EvalSums:
        inputs, target = self._on_device(batch)
        rows = num_rows((inputs, target))
        with evaluation_mode(self.model), torch.no_grad(), self.precision.autocast():
            output = self.precision.outputs(self._evaluated(inputs))
            if rows is not None and valid < rows:
                if has_row_per_sample(output, rows):
                    output = first_rows(output, valid)
                else:  # for example a loss that the model has computed over the padding as well
                    output = self.precision.outputs(self._evaluated(first_rows(inputs, valid)))
                target = first_rows(target, valid)
            weight = self.job.weight(target)
            weight = valid if weight is None else weight
            loss = weighted(self._loss(output, target), weight)
            metrics = checked_metrics(self.job.metrics(output, target), "metrics")
        return EvalSums(loss_sum=loss, weight=torch.as_tensor(weight, dtype=torch.float32), metrics=metrics)

    def capture(self, *, step: int, samples_consumed: int, into: TrainState | None) -> TrainState | None:
        if self.context.global_rank != 0:
            return None
        return self.snapshot(step=step, samples_consumed=samples_consumed, into=into)

    def restore(self, state: TrainState | None, *, source: int) -> dict[str, Any]:
        assert state is not None
        assert source == self.context.global_rank
        self.load(state, consume=True)
        self._continue_from(state.step)
        return state.meta

    def recover_state(
        self, sources: Sequence[int], *, source_step: int, step: int, samples_consumed: int
    ) -> dict[str, Any]:
        """Continue from the model of a survivor; for strategies whose ranks have equal state after a step.

        The tensors are sent from where they are, so that the time hardly grows with the state. Ranks that have the
        state keep it. A new worker receives on its device. A survivor that is behind receives in host memory: on its
        device there may be no room for two states, and until all has arrived, it must not lose its own.
        """
        context, source = self.context, sources[0]
        rank, has_state = context.global_rank, sources[context.global_rank] == context.global_rank
        assert not has_state or step == source_step
        if all(other == own for own, other in enumerate(sources)):
            self._continue_from(step)
            return {"step": step, "samples_consumed": samples_consumed}
        state = broadcast_state(
            self.snapshot(step=step, samples_consumed=samples_consumed, live=True) if rank == source else None,
            source=source,
            rank=rank,
            device=context.device,
            onto=context.device if step == 0 else CPU,
            keep=lambda name: not has_state,
        )
        if not has_state:
            self.load(state, consume=True)
        self._continue_from(state.step)
        return state.meta

    def _continue_from(self, step: int) -> None:
        """Take note that the model has the state after ``step``, which may have been loaded."""

    @property
    def full_model(self) -> nn.Module | None:
        return self.model if self.context.global_rank == 0 else None

    def _warning_about_parts(self, train_set: Dataset[Any]) -> str | None:
        """Return what differs because batches are divided. Before the model is compiled, for one shape of a batch."""
        context, division = self.context, self._division()
        if division is None or context.global_rank != 0:
            return None
        return warning_about_parts(
            self.model,
            self.job,
            train_set,
            division,
            device=context.device,
            precision=self.precision,
            seed=context.seed,
            loss=self._loss_of_parts(),
        )

    def _division(self) -> Division | None:
        """Return how this strategy divides the global batch; None if it does not."""
        context, options = self.context, self.context.options
        replicas, slices = context.mesh.data_parallel_size * context.num_devices, context.train.grad_accumulation
        if replicas * slices == 1:
            return None
        return Division(
            by=by_keys(options.name, num_workers=replicas, grad_accumulation=slices),
            rows=self.eval_batch_size // context.num_devices,
            in_turn=slices > 1,
            synchronous=registry.load(options.name).is_synchronous(options),
        )

    def _loss_of_parts(self) -> LossOfParts:
        """Return the loss of a batch that is divided."""
        return mean_loss(self.job)

    def _set_up_optimizer(self) -> None:
        self.use(optimizer_of(self.job, self.model))

    def _weigh(self, slices: Sequence[Any]) -> tuple[Sequence[float | Tensor], float | Tensor]:
        return self._weights([target for _, target in slices])

    def _backward(
        self, slices: Sequence[Any], weights: Sequence[float | Tensor], total_weight: float | Tensor
    ) -> Tensor:
        loss_sum = torch.zeros((), device=self.context.device)
        last = len(slices) - 1
        for i, ((inputs, target), weight) in enumerate(zip(slices, weights, strict=True)):
            with self._gradient_sync(i == last):
                with self.precision.autocast():
                    loss = self._mean_loss(inputs, target)
                (summable(loss) * (weight / total_weight * self.context.mesh.data_parallel_size)).backward()
            loss_sum += weighted(loss.detach(), weight)
        self._after_backward()
        return loss_sum

    def _weights(self, targets: Sequence[Any]) -> tuple[Sequence[float | Tensor], float | Tensor]:
        """Return the weight of each slice of the batch, and the weight of the global batch.

        The weights are those of the job, or else the numbers of samples.
        """
        weights = [self.job.weight(target) for target in targets]
        if weights[0] is None:
            train, mesh = self.context.train, self.context.mesh
            share = even_shares(train.global_batch_size, mesh.data_parallel_size)[self.context.dp_rank]
            return even_shares(share, train.grad_accumulation), train.global_batch_size
        job_weights = [w for w in weights if w is not None]
        return job_weights, self._sum_over_ranks(sum(job_weights))

    def _forward(self, inputs: Any) -> Any:
        """Return the output for training; a hook for subclasses, as are the methods below."""
        return self.forward_model(inputs)

    def _evaluated(self, inputs: Any) -> Any:
        return self.job.forward(self.model, inputs)

    def _mean_loss(self, inputs: Any, target: Any) -> Tensor:
        output = self.precision.outputs(self._forward(inputs))
        loss = self._loss(output, target)
        self._measure(output, target)
        return loss

    def _loss(self, output: Any, target: Any) -> Tensor:
        return self.job.loss(output, target)

    def _sum_over_ranks(self, weight: float | Tensor) -> float | Tensor:
        return weight

    def _after_backward(self) -> None:
        """Do what follows the backward passes of a step, before its update."""

    def _gradient_norm(self) -> Tensor:
        return nn.utils.get_total_norm([entries(p.grad) for p in self.parameters if p.grad is not None])

    @contextlib.contextmanager
    def _gradient_sync(self, last: bool) -> Iterator[None]:
        """Wrap the forward and backward pass of a slice; ``last`` is True for the last slice of the step."""
        yield


class _JobForward(nn.Module):
    """``Job.forward`` as a module of one argument, for ``DistributedDataParallel``, which has to see each call."""

    def __init__(self, job: Job, model: nn.Module):
        super().__init__()
        self.job = job
        self.model = model

    def forward(self, inputs: Any) -> Any:
        return self.job.forward(self.model, inputs)


def forward_module(job: Job, model: nn.Module) -> nn.Module:
    """Return a module that is called with a batch's input: ``model``, unless the job overrides ``forward``."""
    return model if type(job).forward is Job.forward else _JobForward(job, model)


def weighted(loss: Tensor, weight: float | Tensor) -> Tensor:
    """Return the summed loss of a batch, given its mean. It is 0 for a weight of 0, for which the mean is NaN."""
    loss = summable(loss)
    if isinstance(weight, Tensor):
        return torch.where(weight > 0, loss * weight, torch.zeros_like(loss))
    return loss * weight if weight else torch.zeros_like(loss)


def divisor_of(weight: float | Tensor) -> Tensor:
    """Return the weight of a batch as a divisor: 1 for a weight of 0, so that its loss of 0 does not become NaN."""
    weight = torch.as_tensor(weight, dtype=torch.float32)
    return torch.where(weight > 0, weight, 1.0)


def entries(gradient: Tensor) -> Tensor:
    """Return the values of a gradient, without duplicate entries: a sparse one may have several for one index."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient

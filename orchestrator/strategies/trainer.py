"""A strategy put together from parts, and the step of the synchronous ones.

Each part has one reason to change:

- the passes: which part of the model is on this rank, and how a batch passes through it, forward and backward
  (:class:`WholeModel`, or a ``Chain`` of stages);
- the reduction: how gradients become sums over the ranks, and what their norm is;
- what is trained: how an update of it is made, skipped or undone, and what its state is.

Here the state is equal on all ranks after a step: rank 0 saves it, and every rank can provide it to every other.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

from orchestrator.compat.generators import kept_generators
from orchestrator.job import Job
from orchestrator.model.batch import split_batch, to_device
from orchestrator.model.modes import note_on_dropout
from orchestrator.model.precision import Precision
from orchestrator.protocol.messages import ANY_RANK, RecoverableSteps
from orchestrator.protocol.metrics import Metric, MetricSpec, measured
from orchestrator.state.model_state import own_tensors
from orchestrator.state.train_state import TrainState
from orchestrator.state.transport import CPU, broadcast_state
from orchestrator.strategies import registry
from orchestrator.strategies.base import StepResult
from orchestrator.strategies.compared_trainer import ComparedTrainer
from orchestrator.strategies.data.batch_parts import BatchDivision, Remark, by_keys, warning_about_parts
from orchestrator.strategies.measure.device import TensorSize, prepare_device, sizes_of
from orchestrator.strategies.measure.job_metrics import (
    BatchMetrics,
    EvalSums,
    SumCheck,
    evaluation_metrics,
    train_metrics,
)
from orchestrator.strategies.rank_context import Context
from orchestrator.strategies.reduction import Reduction, Weight
from orchestrator.strategies.trained import Trained
from orchestrator.strategies.update.gradients import check_gradient_hooks
from orchestrator.strategies.update.job_optimizer import Closure, evaluation_weights, optimizer_of
from orchestrator.strategies.update.weight_average import averaged as averaged_weights
from orchestrator.strategies.whole_model import Passes, WholeModel

LOSS_SCALE = MetricSpec(name="train/loss_scale")


class Trainer(ComparedTrainer):
    """A strategy put together from parts. It has the step of synchronous strategies; others have their own.

    Unless a subclass chooses other parts, the whole model is on every rank, and a rank has no peers.
    """

    passes_class: ClassVar[type[WholeModel]] = WholeModel
    """The passes that :meth:`setup` builds."""

    passes: Passes
    trained: Trained
    reduction: Reduction = Reduction()
    _warnings: tuple[Remark, ...] = ()

    def __init__(self, context: Context, job: Job):
        super().__init__(context, job)
        prepare_device(context.train.precision, context.device)
        precision = Precision.named(context.train.precision, context.device.type)
        self.precision = replace(precision, keeps_casts=not context.mesh.divides_tensors)
        self._train_metrics = SumCheck("train_metrics", functools.partial(train_metrics, job))
        self._eval_metrics = SumCheck("metrics", functools.partial(evaluation_metrics, job))

    def setup(self, train_set: Dataset[Any]) -> None:
        model = self.build(train_set)
        self.trained = self.trained_of(model, train_set)

    def trained_of(self, model: nn.Module, train_set: Dataset[Any]) -> Trained:
        """Return what this rank trains of ``model``."""
        return Trained(self.job, self.context, [model], {"": optimizer_of(self.job, model)}, train_set)

    def build(self, train_set: Dataset[Any]) -> nn.Module:
        """Build the passes through the whole model, and find out what differs because batches are divided."""
        context = self.context
        whole = self.passes = self.passes_class(self.job, context, self.precision)
        self.check_hooks(whole.model)
        self._warnings = self.notes_on(whole.model, train_set)
        whole.compile(context.train)  # after the comparison, for one shape of a batch
        return whole.model

    def notes_on(self, model: nn.Module, train_set: Dataset[Any]) -> tuple[Remark, ...]:
        """Return what the user should know of the model and of batches that are divided."""
        remarks = [Remark(note)] if (note := note_on_dropout(model)) is not None else []
        if self.context.global_rank == 0 and (division := self._division()) is not None:
            remarks += filter(None, [self.warning_about(division, model, train_set)])
        return tuple(remarks)

    def warning_about(self, division: BatchDivision, model: nn.Module, train_set: Dataset[Any]) -> Remark | None:
        """Compare a batch with its halves; see :func:`warning_about_parts`."""
        assert isinstance(self.passes, WholeModel)
        return self.warning_of(self.passes, division, train_set)

    def warning_of(self, passes: WholeModel, division: BatchDivision, train_set: Dataset[Any]) -> Remark | None:
        """Compare a batch with its halves in the model of ``passes``."""
        context = self.context
        return warning_about_parts(
            passes.model,
            self.job,
            train_set,
            division,
            device=context.device,
            precision=self.precision,
            seed=context.seed,
            loss=passes.loss_of_parts(context),
        )

    def check_hooks(self, model: nn.Module, *, num_microbatches: int = 1, shared: bool = False) -> None:
        """Refuse hooks that make another gradient of parts of a batch, among those of this rank's parameters.

        Args:
            num_microbatches: the parts of a slice.
            shared: whether the gradient of a parameter may be a sum over stages.

        Raises:
            JobError: there are such hooks.
        """
        context, name = self.context, self.context.options.name
        replicas, slices = context.mesh.data_parallel_size, context.train.grad_accumulation
        check_gradient_hooks(
            model.named_parameters(),
            by=by_keys(
                name,
                num_workers=context.mesh.num_workers if replicas > 1 else 1,
                num_microbatches=num_microbatches,
                grad_accumulation=slices,
            ),
            replicas=shared or (replicas > 1 and registry.load(name).is_synchronous(context.options)),
            in_turn=slices * num_microbatches > 1,
        )

    def setup_warnings(self) -> tuple[Remark, ...]:
        return self._warnings

    def attach(self) -> None:
        """Undo an interrupted step, and free gradients, for which a recovery may have no room."""
        trained = self.trained
        if trained.in_step and not trained.settled:
            trained.undo_step()
        if not trained.settled:
            trained.drop_gradients()

    def sync_initial_state(self) -> None:
        self.reduction.sync_initial_state()

    def train_step(self, microbatches: Sequence[Any], *, want_grad_norm: bool, want_metrics: bool) -> StepResult:
        context, reduction, trained = self.context, self.reduction, self.trained
        with self.around_step(logged=want_metrics):
            metrics = BatchMetrics(self._train_metrics if want_metrics else None)
            slices = [self.on_device(batch) for batch in microbatches]
            trained.begin_step(has_peers=context.mesh.world_size > 1)
            loss_sum, weight = self.add_gradients(slices, metrics)
            wants_norm = trained.needs_norm or want_grad_norm
            trained.settled = reduction.settles and not trained.needs_whole
            norm = reduction.norm(trained.parameters, context.device) if wants_norm or reduction.settles else None
            if trained.needs_closure:
                mean = reduction.mean_loss(loss_sum, weight)
                trained.closure = Closure(trained.parameters, mean, functools.partial(self._loss_again, slices))
            self.hooks.confirm()
            if self.hooks.observe is not None:
                named = trained.module().named_parameters()
                self.hooks.observe((name, parameter) for name, parameter in named if self.is_first_with(name))
            if trained.needs_whole:
                self._compute_update(norm)
            admitted = self.end_step(norm)
            self._warn_of(self._train_metrics)
            result = StepResult(
                loss_sum=loss_sum,
                weight=torch.as_tensor(weight, dtype=torch.float32),
                grad_norm=norm if wants_norm else None,
                skipped=not admitted,
                metrics=metrics.sums,
            )
            return result if context.counts_samples else replace(result, **_nothing(result))

    def add_gradients(self, slices: Sequence[Any], metrics: BatchMetrics) -> tuple[Tensor, Weight]:
        """Add the gradients of a batch. Return the summed loss of this rank, and its weight."""
        context, reduction, trained = self.context, self.reduction, self.trained
        factor = trained.loss_factor * reduction.averages_over
        # At each point that a closure is asked for, the batch draws the same random numbers.
        with kept_generators(context.device) if trained.needs_closure else contextlib.nullcontext():
            loss_sum, weight = self.passes.backward(slices, reduction, metrics, context=context, factor=factor)
        reduction.finish()
        trained.check_untrained()
        trained.unscale()
        return loss_sum, weight

    def _compute_update(self, norm: Tensor | None) -> None:
        """Compute an update of whole tensors together with the ranks that have shards of them."""
        reduction, trained = self.reduction, self.trained
        trained.compute_update(norm, reduction.shard_map)
        if reduction.settles:  # as for the norm: no rank makes its update before all ranks can
            trained.settled = True
            dist.all_reduce(torch.zeros((), device=self.context.device))
        self.hooks.confirm()

    def _loss_again(self, slices: Sequence[Any]) -> Tensor:
        """Return the loss of the global batch at other weights, and add its gradients."""
        loss = self.reduction.mean_loss(*self.add_gradients(slices, BatchMetrics(None)))
        self.hooks.confirm()
        return loss

    def around_step(self, *, logged: bool) -> contextlib.AbstractContextManager[None]:
        """Return a context for the whole of a step; ``logged``: whether the step is logged."""
        return contextlib.nullcontext()

    def end_step(self, norm: Tensor | None) -> bool:
        """Make the update, given the norm of the gradient, or skip it. Return whether it was made."""
        trained = self.trained
        trained.settled = False
        if admitted := trained.admits(norm):
            trained.clip(norm)
            self.apply()
        trained.in_step, trained.norm = False, norm
        return admitted

    def apply(self) -> None:
        """Change the parameters and the learning rate, from the gradients."""
        self.trained.apply()

    def evaluate(self, batch: Any, valid: int) -> EvalSums:
        sums = self.passes.evaluate(self.on_device(batch), valid, self._evaluated)
        self._warn_of(self._eval_metrics)
        return sums if self.context.counts_samples else replace(sums, **_nothing(sums))

    def capture(
        self, *, step: int, samples_consumed: int, into: TrainState | None, part: bool = False
    ) -> TrainState | None:
        if self.context.global_rank != 0:
            return None
        return self.trained.to_save(step=step, samples_consumed=samples_consumed, into=into, left_out=self.left_out)

    def state_to_save(self) -> TrainState | None:
        if self.context.global_rank not in self.saved.writers:
            return None
        return self.trained.snapshot(step=0, samples_consumed=0, live=True, left_out=self.left_out)

    @contextlib.contextmanager
    def kept_buffers(self) -> Iterator[None]:
        self.trained.keep()
        try:
            yield
        finally:
            self.trained.undo_step()

    def is_first_with(self, name: str) -> bool:
        """Return whether this is the first rank that has the parameter, or this part of it."""
        return self.trained.placements[name].saves(self.context.mesh, self.context.global_rank)

    def frozen(self) -> Mapping[str, int]:
        return self.trained.frozen(self.is_first_with)

    @property
    def left_out(self) -> Mapping[str, int]:
        """What is left out of the state to be saved, with checksums."""
        if self.context.only_trained or self.traits.divides_model:
            return self.frozen() if self.context.only_trained else {}
        dropped = self.trained.dropped
        return self.trained.frozen(lambda name: name in dropped and self.is_first_with(name)) if dropped else {}

    def restore(self, state: TrainState | None, *, source: int | None) -> dict[str, Any]:
        if self.context.mesh.world_size > 1 and source is not None:
            state = broadcast_state(state, source=source, rank=self.context.global_rank, device=self.context.device)
        assert state is not None
        self.load(state)
        return state.meta

    def recoverable_steps(self, step: int) -> RecoverableSteps:
        return {ANY_RANK: (step,)} if self.context.mesh.world_size > 1 else {}

    def recover_state(
        self, sources: Sequence[int], *, source_step: int, step: int, samples_consumed: int
    ) -> dict[str, Any]:
        """Continue from the state of a survivor.

        The tensors are sent from where they are, so that the time hardly grows with the state. Ranks that have the
        state keep it. A new worker receives on its device, the model in place. A survivor that is behind receives in
        host memory: on its device there may be no room for two states, and until all has arrived, it must not lose its
        own.
        """
        context, source = self.context, sources[0]
        rank, has_state = context.global_rank, sources[context.global_rank] == context.global_rank
        assert not has_state or step == source_step
        if all(other == own for own, other in enumerate(sources)):
            return {"step": step, "samples_consumed": samples_consumed}
        state = broadcast_state(
            self.trained.snapshot(step=step, samples_consumed=samples_consumed, live=True) if rank == source else None,
            source=source,
            rank=rank,
            device=context.device,
            onto=context.device if step == 0 else CPU,
            into=self.initial_model() if step == 0 else None,
            keep=lambda name: not has_state,
        )
        if not has_state:
            self.load(state)
        return state.meta

    def initial_model(self) -> TrainState:
        """Return the tensors in which a new worker receives the state of its model."""
        own = own_tensors(self.trained.module())
        return TrainState(model={name: tensor.detach() for name, tensor in own.items()}, optimizer={}, meta={})

    def load(self, state: TrainState, *, partial: bool = False, consume: bool = True) -> None:
        """Load this rank's part of ``state`` as ``Trained.load`` does, once it has arrived."""
        self.hooks.confirm()
        self.trained.load(state, partial=partial, consume=consume)

    @property
    def own_model(self) -> nn.Module | None:
        return None if self.traits.divides_model else self.trained.module()

    def weights_to_evaluate(self, *, averaged: bool = False) -> contextlib.AbstractContextManager[None]:
        return (averaged_weights if averaged else evaluation_weights)(self.trained.optimizer)

    @property
    def group_lrs(self) -> Sequence[float]:
        return [float(group["lr"]) for group in self.trained.optimizer.param_groups]

    @property
    def follows_evaluations(self) -> bool:
        scheduler = self.trained.scheduler
        return scheduler is not None and scheduler.follows_evaluations

    def steer(self, lr_factor: float, measured: Sequence[float], *, new_run: bool = False) -> None:
        if self.trained.scheduler is not None:
            self.trained.scheduler.steer(lr_factor, measured, new_run=new_run)

    def metrics(self) -> Mapping[str, Metric]:
        scale = self.trained.loss_scale
        return measured({LOSS_SCALE: None if scale is None else scale.factor})

    def tensor_sizes(self) -> Iterable[TensorSize]:
        return sizes_of(self.trained.module(), self.trained.optimizer)

    def _evaluated(self, output: Any, target: Any) -> Mapping[str, Tensor]:
        if self.hooks.update_metrics is not None and self.context.counts_samples:
            self.hooks.update_metrics(output, target)
        return self._eval_metrics(output, target)

    def _warn_of(self, metrics: SumCheck) -> None:
        if metrics.warning is not None and self.context.dp_rank == 0:
            self.hooks.warn(metrics.warning)
            metrics.warning = None

    @property
    def num_microbatches(self) -> int:
        """The parts of a slice."""
        return 1

    def _division(self) -> BatchDivision | None:
        """Return how this strategy divides the global batch; None if it does not."""
        context, options, microbatches = self.context, self.context.options, self.num_microbatches
        replicas, slices = context.mesh.data_parallel_size * context.num_devices, context.train.grad_accumulation
        if replicas * slices * microbatches == 1:
            return None
        workers = replicas if context.pipeline is None or replicas == 1 else context.mesh.num_workers
        return BatchDivision(
            by=by_keys(options.name, num_workers=workers, num_microbatches=microbatches, grad_accumulation=slices),
            rows=self.eval_batch_size // context.num_devices // microbatches,
            in_turn=slices * microbatches > 1,
            cut=replicas * slices == 1,
            synchronous=registry.load(options.name).is_synchronous(options),
        )

    def on_device(self, batch: Any) -> tuple[Any, Any]:
        """Return the inputs and the target of a batch on the device, the inputs in the model's dtype."""
        inputs, target = split_batch(to_device(batch, self.context.device))
        return self.precision.inputs(inputs), target


def _nothing(result: StepResult | EvalSums) -> dict[str, Any]:
    """Return the sums over no samples, in place of those of ``result``."""
    zeros = torch.zeros_like
    return {"loss_sum": zeros(result.loss_sum), "weight": zeros(result.weight), "metrics": {}}

"""The interface of a strategy, which lays a job out over workers. Plain torch: no Ray, Hydra or MLflow."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils.data import Dataset

from orchestrator.job import Job
from orchestrator.planning.mesh import even_shares
from orchestrator.protocol.events import StageSummary
from orchestrator.protocol.messages import RecoverableSteps
from orchestrator.protocol.metrics import Metric
from orchestrator.state.train_state import TrainState
from orchestrator.strategies.data.batch_parts import Remark
from orchestrator.strategies.measure.device import TensorSize
from orchestrator.strategies.measure.job_metrics import EvalSums
from orchestrator.strategies.rank_context import Context
from orchestrator.strategies.update.confirmation import no_confirmation
from orchestrator.timeline import Span


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The result of a training step: scalar tensors, on the device where possible, so that reading them can wait.

    Attributes:
        loss_sum: the sum over this rank's samples of weight times loss.
        weight: the sum of this rank's weights.
        grad_norm: the 2-norm of the gradient of the whole model; None if neither the caller nor the step needed it.
        skipped: whether the update was left out because the gradient was not finite.
        metrics: further metrics by name, as sums over this rank's samples; the run's value is the sum over the ranks,
            divided by that of ``weight``. Empty unless the caller wanted them.
    """

    loss_sum: Tensor
    weight: Tensor
    grad_norm: Tensor | None
    skipped: bool = False
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Compared:
    """The result of a comparison with the whole model that has found no difference.

    Attributes:
        notes: what was not compared, for the user.
        model: what the model is made of, on the first rank, if all was compared now.
    """

    notes: tuple[str, ...] = ()
    model: str | None = None


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What is special about a strategy, or a rank of it.

    Attributes:
        runs_training_step: whether jobs that override ``Job.training_step`` are supported.
        cuts_batches: whether batches are cut into parts by samples, which have to have one shape.
        reads_data: whether the rank reads batches; others are given None instead.
        divides_model: whether no rank has the whole model, so that the ranks gather it for the job to see it.
        moves_parameters: whether ranks hold parameters, or parts of them, in other memory than ``job.model()`` gives
            them.
        evaluates_padding: whether :meth:`Strategy.evaluate` is called for batches without valid samples too, because
            all ranks compute together.
        counts_flops: whether the thread that calls :meth:`Strategy.train_step` sees all its operations.
        nonfinite_advice: what to change after a NaN or infinite loss, if the strategy itself may cause it.
    """

    runs_training_step: bool = False
    cuts_batches: bool = False
    reads_data: bool = True
    divides_model: bool = False
    moves_parameters: bool = False
    evaluates_padding: bool = False
    counts_flops: bool = True
    nonfinite_advice: str | None = None


@dataclass(kw_only=True)
class Hooks:
    """What the worker lends to a strategy, which calls it.

    Attributes:
        confirm: to be called before an update, before received state is loaded, and before numbers of the device are
            used: see :mod:`orchestrator.strategies.update.confirmation`.
        warn: to be called with what the user should know of the job. One rank does.
        observe: called in a step, before the update, with what this rank has of the parameters, by name, and their
            gradients. These are of the whole batch, without the factor of the loss, and not clipped. Of all ranks, one
            has each parameter, or each part of it.
        update_metrics: called in :meth:`Strategy.evaluate` with the output and the target of the samples that count,
            maybe in parts.
    """

    confirm: Callable[[], None] = no_confirmation
    warn: Callable[[str], None] = lambda text: None
    observe: Callable[[Iterable[tuple[str, nn.Parameter]]], None] | None = None
    update_metrics: Callable[[Any, Any], None] | None = None


@dataclass(frozen=True, kw_only=True)
class Saved:
    """Who saves a state, and what.

    Attributes:
        writers: the global ranks that have a part of it; the first one has all the rest.
        names: the names of all parameters and buffers, in the order of the whole model, if there are several writers.
    """

    writers: Sequence[int] = (0,)
    names: Sequence[str] = ()


class Strategy(abc.ABC):
    """One rank's part of the model and its update.

    Methods are listed in the order of a run. In each generation of the run, which has a process group of its own,
    :meth:`attach` is the first and :meth:`close` the last.
    """

    traits: Traits = Traits()
    """What is special about the strategy, or this rank."""

    def flop_share(self) -> float:
        """Return how much the operations that run now count: what several ranks compute alike counts once."""
        return 1

    # Set-up on each rank

    def __init__(self, context: Context, job: Job):
        self.context = context
        self.job = job
        self.hooks = Hooks()

    @abc.abstractmethod
    def setup(self, train_set: Dataset[Any]) -> None:
        """Build this rank's part of model, optimizer and scheduler, once, before the first :meth:`attach`.

        The seed is equal on all ranks, and so are the initial values. ``train_set`` provides sample inputs.
        """

    def reassign(self, context: Context) -> None:
        """Take another place in the run, before the :meth:`attach` of a later generation.

        The model remains cut as it is.
        """
        self.context = context

    def attach(self) -> None:
        """Build what needs the process group: after :meth:`setup`, and again in each later generation.

        Model and optimizer may be at different steps on different ranks until the state is synchronised.
        """

    def stage_summaries(self) -> tuple[StageSummary, ...]:
        """Return the content of each stage of the model; empty if the model is not cut."""
        return ()

    def setup_warnings(self) -> tuple[Remark, ...]:
        """Return what the user should know of the set-up on this rank, such as a check that could not be made."""
        return ()

    def sync_initial_state(self) -> None:
        """Give all ranks the same initial values, in case the model's constructor ignores the seed."""

    def compare_with_whole(
        self, train_set: Dataset[Any], *, known: Callable[[str], bool], is_cut: Callable[[], bool]
    ) -> Compared:
        """Compare what the ranks compute of some samples with the whole model, if that can be. All ranks call this.

        Args:
            train_set: the samples.
            known: returns on the first rank whether a model was compared before, given what it is made of.
            is_cut: returns on the first rank whether the run stops, so that nothing more is compared.

        Raises:
            JobError: the ranks would train another model.
        """
        return Compared()

    # The step

    @abc.abstractmethod
    def train_step(self, microbatches: Sequence[Any], *, want_grad_norm: bool, want_metrics: bool) -> StepResult:
        """Make one optimizer update from this rank's share of the global batch.

        Args:
            microbatches: ``train.grad_accumulation`` collated batches, on the host or on the device, as
                ``model.batch.split_batch`` takes them; None in place of each if not ``reads_data``.
            want_grad_norm: whether the result must have ``grad_norm``.
            want_metrics: whether the result must have the ``metrics`` of the job.

        Raises:
            ValueError: the model cannot be trained by this strategy; the text says what to change.
        """

    def after_step(self, *, step: int, samples_consumed: int) -> None:
        """Do work that follows a completed step, such as copying the state to a neighbour.

        Args:
            step: the step that was completed, from 1.
            samples_consumed: global samples consumed up to and including that step.
        """

    # Reporting, after a step that is logged

    @property
    @abc.abstractmethod
    def group_lrs(self) -> Sequence[float]:
        """The learning rate of the next step, of each parameter group of the optimizer on this rank."""

    def comm_ms(self) -> float | None:
        """Return how long the last step waited for other ranks, in ms; None if unknown or without communication."""
        return None

    def spans(self) -> tuple[Span, ...]:
        """Return what the stages of this rank did in the last step; empty if the model is not cut."""
        return ()

    def metrics(self) -> Mapping[str, Metric]:
        """Return the strategy's own metrics since the last call, under the names by which they are logged."""
        return {}

    def tensor_sizes(self) -> Iterable[TensorSize]:
        """Return the sizes of the tensors of the training state on this rank; empty if unknown."""
        return ()

    # Evaluation and checkpoints

    @property
    def follows_evaluations(self) -> bool:
        """Whether the learning rates depend on what evaluations measure, by the job's scheduler itself."""
        return False

    def steer(self, lr_factor: float, measured: Sequence[float], *, new_run: bool = False) -> None:
        """Change the learning rates from the next step on. All ranks call this at the same step.

        Args:
            lr_factor: what all rates are multiplied by, of what the schedule says.
            measured: the metric that a scheduler follows, of each evaluation of the run so far.
            new_run: whether the state is the end of another run.
        """

    def quiesced(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which all ranks are idle at one state of the model, entered by all at the same step.

        Synchronous strategies are always in that state; asynchronous ones wait for each other.
        """
        return contextlib.nullcontext()

    def weights_to_evaluate(self, *, averaged: bool = False) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the weights are those to evaluate, if the optimizer has modes.

        ``averaged``: their moving average, which ``train.ema_decay`` asks for.
        """
        return contextlib.nullcontext()

    @property
    def eval_batch_size(self) -> int:
        """The number of samples in the batches given to :meth:`evaluate`: as many as in a slice of a training step."""
        train = self.context.train
        share = even_shares(train.global_batch_size, self.context.mesh.data_parallel_size)[0]
        return even_shares(share, train.grad_accumulation)[0]

    @abc.abstractmethod
    def evaluate(self, batch: Any, valid: int) -> EvalSums:
        """Compute loss and metrics of the first ``valid`` samples of ``batch``; the others are padding.

        There is at least one, unless :attr:`evaluates_padding`. A batch without a row for each sample has no padding,
        unless :attr:`cuts_batches`. Only one of the ranks that share the batch returns sums other than zero.
        """

    @abc.abstractmethod
    def capture(
        self, *, step: int, samples_consumed: int, into: TrainState | None, part: bool = False
    ) -> TrainState | None:
        """Copy the state to be saved to host memory. All ranks call this at the same step.

        Args:
            step: the last completed step.
            samples_consumed: global samples consumed up to that step.
            into: an earlier snapshot whose memory may be reused.
            part: copy what this rank writes, which needs no other rank, if there are several writers.

        Returns:
            The state of the whole model on the rank that saves, or the part of a writer; None on the others.
        """

    def state_to_save(self) -> TrainState | None:
        """Return what this rank adds to a checkpoint, as tensors that the next update changes; None if nothing.

        It needs no other rank, and shows whether :meth:`capture` can succeed.
        """
        return None

    def kept_buffers(self) -> contextlib.AbstractContextManager[None]:
        """Return a context at whose end the buffers of the model are what they were before."""
        return contextlib.nullcontext()

    @property
    def saved(self) -> Saved:
        """Who saves the state."""
        return Saved()

    def frozen(self) -> Mapping[str, int]:
        """Return the checksums of the parameters that no optimizer updates, by name, of the parts on this rank.

        Their sums over all ranks are those of the whole model.
        """
        return {}

    @property
    def own_model(self) -> nn.Module | None:
        """The whole model after the last step, if this rank has all of it; None otherwise."""
        return None

    def gather_model(self) -> Mapping[str, Tensor] | None:
        """Return all tensors of a model that is divided, by name, on rank 0; None on the others. All ranks call this.

        They may be the tensors of the model itself.
        """
        raise NotImplementedError

    # State and recovery, after attach()

    @abc.abstractmethod
    def restore(self, state: TrainState | None, *, source: int | None) -> dict[str, Any]:
        """Continue on all ranks from a state.

        Args:
            state: what rank ``source`` has, whose tensors are removed as they are loaded; None on the others.
            source: the global rank that has the state; None if each rank has read what it needs, of several writers.

        Returns:
            The ``meta`` of the state, on every rank.
        """

    def recoverable_steps(self, step: int) -> RecoverableSteps:
        """Return which states this rank can provide after a failure.

        Args:
            step: the last completed step of this rank.

        Returns:
            For each global rank whose state can be provided, or for ``ANY_RANK``, the steps at which it can.
        """
        return {}

    def recover_state(
        self, sources: Sequence[int], *, source_step: int, step: int, samples_consumed: int
    ) -> dict[str, Any]:
        """Bring every rank to the state after ``source_step``, from the memory of survivors. All ranks call this.

        Args:
            sources: for each global rank, the rank that provides its state.
            source_step: the step from which the run continues.
            step: the last completed step of this rank.
            samples_consumed: global samples consumed up to ``step``.

        Returns:
            The ``meta`` of the state, on every rank.
        """
        raise NotImplementedError

    # The end of a generation

    def close(self) -> None:
        """Release what must not outlive the process group, also after an error and before :meth:`attach`.

        The model remains usable, and :meth:`attach` may follow in another group.
        """

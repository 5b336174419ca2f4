"""The interface of a strategy: how a job is laid over workers. Plain torch: no Ray, Hydra or MLflow."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from orchestrator.config.schema import Config, StrategyConfig, TrainConfig
from orchestrator.job import Job
from orchestrator.planning.layout import LayoutRules
from orchestrator.planning.mesh import Mesh, even_shares
from orchestrator.planning.plan import Plan
from orchestrator.planning.schedules import PipelineLayout
from orchestrator.protocol.events import StageSummary
from orchestrator.protocol.metrics import Metric
from orchestrator.state.train_state import TrainState
from orchestrator.timeline.spans import Span


@dataclass(frozen=True, kw_only=True)
class Context:
    """What a strategy knows of its place in the run."""

    mesh: Mesh
    global_rank: int
    device: torch.device
    seed: int
    train: TrainConfig
    options: StrategyConfig
    pipeline: PipelineLayout | None = None
    num_devices: int = 1
    peer_copy_every: int = 0

    @property
    def dp_rank(self) -> int:
        return self.mesh.dp_rank(self.global_rank)

    @property
    def pp_rank(self) -> int:
        return self.mesh.pp_rank(self.global_rank)


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Scalars on the device: this rank's summed loss and weight, and the norm of the whole gradient
    where it was asked for or needed. ``skipped``: the gradient was not finite and no update was made."""

    loss_sum: Tensor
    weight: Tensor
    grad_norm: Tensor | None
    skipped: bool = False


@dataclass(frozen=True, kw_only=True)
class EvalSums:
    """Scalars on the device: sums over the valid samples of a batch."""

    loss_sum: Tensor
    weight: Tensor
    metrics: Mapping[str, Tensor]


class Strategy(LayoutRules, abc.ABC):
    """One rank's part of the model and its update; as a class, the rules of its layout."""

    reads_data = True
    """Whether this rank looks at batches; the others are given None."""

    def __init__(self, context: Context, job: Job):
        self.context = context
        self.job = job

    @classmethod
    def create(cls, context: Context, job: Job) -> Strategy:
        """Make this rank's part of the strategy."""
        return cls(context, job)

    @classmethod
    def check_job(cls, config: Config, job: Job, plan: Plan, errors: list[str]) -> tuple[str, ...]:
        """Check the job's model against ``plan`` on the driver, without memory for its tensors.

        Append to ``errors`` why the job cannot run so; return notes for the plan.
        """
        return ()

    @abc.abstractmethod
    def setup(self, train_set: Dataset[Any]) -> None:
        """Build this rank's part of model, optimizer and scheduler; seeded, so equal everywhere."""

    def reassign(self, context: Context) -> None:
        """Take another place in the run, before :meth:`attach`; the model stays cut as it is."""
        self.context = context

    def attach(self) -> None:
        """Form what needs the process group, after :meth:`setup` and again in each later generation.

        The model and the optimizer are those of this rank's last completed step.
        """

    def sync_initial_state(self) -> None:
        """Give what several ranks have the same first values, however random the model's constructor is."""

    @abc.abstractmethod
    def train_step(self, microbatches: Sequence[Any], *, want_grad_norm: bool) -> StepResult:
        """One optimizer update from this rank's share of the global batch."""

    def after_step(self, *, step: int, samples_consumed: int) -> None:
        """Once ``step`` counts as done: the place for copies that a lost rank may need."""

    @abc.abstractmethod
    def evaluate(self, batch: Any, valid: int) -> EvalSums:
        """Loss and metrics of the first ``valid`` samples of ``batch``."""

    @abc.abstractmethod
    def capture(self, *, step: int, samples_consumed: int, into: TrainState | None) -> TrainState | None:
        """A host snapshot of what this rank has to save; None where another rank saves it.

        Every rank calls it at the same step. ``into`` is an old snapshot whose memory may be used.
        """

    def recoverable_steps(self, step: int, *, update_complete: bool) -> Mapping[int, tuple[int, ...]]:
        """Of which ranks this one could hand over the state, and after which steps; ``step`` is its own last one.

        ``update_complete``: it is known that nothing is under way after it; otherwise an update may be, on a GPU.
        """
        return {}

    def recover_state(
        self, sources: Sequence[int], *, source_step: int, step: int, samples_consumed: int
    ) -> dict[str, Any]:
        """Bring every rank to the state after ``source_step``; returns its ``meta``.

        ``sources`` has for each rank the one that holds its state; all ranks call it, after :meth:`attach`. ``step``
        and ``samples_consumed`` are where this rank stands.
        """
        raise NotImplementedError

    @abc.abstractmethod
    def restore(self, state: TrainState | None, *, source: int) -> dict[str, Any]:
        """Continue from the state that rank ``source`` holds; returns its ``meta`` on every rank."""

    @property
    def eval_batch_size(self) -> int:
        """Rows of the batches that :meth:`evaluate` takes."""
        return even_shares(self.context.train.global_batch_size, self.context.mesh.data_parallel_size)[0]

    @property
    @abc.abstractmethod
    def lr(self) -> float:
        """The learning rate of the next step."""

    @property
    def full_model(self) -> nn.Module | None:
        """The whole model, on the rank that has it and should show it; elsewhere None."""
        return None

    @property
    def nonfinite_advice(self) -> str | None:
        """What to do where the loss became NaN or infinite, if that may be the strategy's doing."""
        return None

    def close(self) -> None:
        """Give up what must not outlive the process group, whatever happened. The model stays usable, and
        :meth:`attach` may follow in another group."""

    def quiesced(self) -> contextlib.AbstractContextManager[None]:
        """Around what all ranks do with one state of the model; asynchronous strategies wait for each other."""
        return contextlib.nullcontext()

    def metrics(self) -> Mapping[str, Metric]:
        """What the strategy has to tell of itself since the last call, under the names it is logged by."""
        return {}

    def spans(self) -> tuple[Span, ...]:
        """What the stages of this rank did in the last step; empty where the model is not cut."""
        return ()

    def stage_summaries(self) -> tuple[StageSummary, ...]:
        """What each stage of the model consists of; empty where it is not cut."""
        return ()

    def comm_ms(self) -> float | None:
        """How long the step that has just been done waited for other ranks; asked in steps that are logged.

        None: there is nothing to wait for, or it is not known.
        """
        return None

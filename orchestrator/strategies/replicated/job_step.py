"""The training of a job that overrides ``Job.training_step``, under ``single`` and ``ddp``.

The job makes its updates itself, from the losses of its own share of the batch. A hook in the ``step()`` of each
optimizer first replaces the gradients of that optimizer's parameters by their mean over the global batch: each rank's
gradients, weighted by its number of samples, are summed. ``DistributedDataParallel`` is not used, because it expects
one forward pass and one backward pass, after which all parameters have their gradients.

After the step, all ranks take the buffers of rank 0. A step that fails between two updates cannot be undone, so no rank
offers its state then, and the run continues from a checkpoint.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from orchestrator.compat.torch import version_of
from orchestrator.job import Job
from orchestrator.model.batch import to_device
from orchestrator.planning.mesh import even_shares
from orchestrator.protocol.messages import RecoverableSteps
from orchestrator.state.train_state import TrainState
from orchestrator.state.transport import broadcast_tensors
from orchestrator.strategies.base import StepResult, Traits
from orchestrator.strategies.keys import MeshConfig
from orchestrator.strategies.measure.device import WaitTimer
from orchestrator.strategies.rank_context import Context
from orchestrator.strategies.replicated import gather
from orchestrator.strategies.replicated.sync_batchnorm import synchronize
from orchestrator.strategies.trained import Trained
from orchestrator.strategies.trainer import Trainer
from orchestrator.strategies.training_step import checked_result, models_of, optimizers_of
from orchestrator.strategies.update.gradients import clip, norm_over, weighted_sum_over
from orchestrator.strategies.whole_model import WholeModel
from orchestrator.user_code.errors import JobError


class JobStep(Trainer):
    """The whole model, with equal state on every rank, trained by ``Job.training_step``."""

    traits = Traits(
        runs_training_step=True,
        nonfinite_advice="lower the learning rates, or clip with train.clip_norm=1.0",  # without on_nonfinite=skip
    )
    passes: WholeModel

    def __init__(self, context: Context, job: Job):
        super().__init__(context, job)
        self._updating = False  # from the first update of a step to its end
        self._frozen_versions_before: Sequence[tuple[int, int]] = ()
        self._wants_norm = False
        self._norms: dict[str, Tensor] = {}
        self._waits = WaitTimer(context.device)  # for the other ranks

    def setup(self, train_set: Dataset[Any]) -> None:
        model = self.build(train_set)
        self.models = models_of(model)
        self.optimizers = optimizers_of(self.job, model)
        self.trained = Trained(self.job, self.context, [model], self.optimizers, train_set)
        self.trained.parameters = list(model.parameters())  # the job may train what is frozen now
        owned = {p for group in self.trained.optimizer.param_groups for p in group["params"]}
        self._frozen = [p for p in model.parameters() if p not in owned]
        for name, optimizer in self.optimizers.items():
            optimizer.register_step_pre_hook(functools.partial(self._before_update, name))
            optimizer.register_step_post_hook(_forget_casts)
        if isinstance(options := self.context.options, MeshConfig) and options.sync_batchnorm:
            synchronize(model, self.context.device)

    def _division(self) -> None:
        """The job makes its own updates, so nobody else can compute its loss."""

    def attach(self) -> None:
        if self._partly_updated:
            self.trained.drop_gradients()
        else:
            super().attach()

    def sync_initial_state(self) -> None:
        if self._has_peers:
            tensors = (*self.passes.model.parameters(), *self.passes.model.buffers())
            broadcast_tensors(tensors, source=0, device=self.context.device)

    def train_step(self, microbatches: Sequence[Any], *, want_grad_norm: bool, want_metrics: bool) -> StepResult:
        (batch,) = microbatches
        batch = to_device(batch, self.context.device)
        self._frozen_versions_before = self._frozen_versions()
        self._wants_norm, self._norms = want_grad_norm, {}
        self._waits.restart(counts=want_metrics)
        self.trained.begin_step(has_peers=self._has_peers)
        with self.precision.autocast(), gather.training_step():
            result = self.job.training_step(self.models, batch, self.optimizers)
        loss, metrics = checked_result(result)
        if self._has_peers:
            self._share_buffers()
        self.trained.schedule()
        self._end_step()
        norms = list(self._norms.values())
        return StepResult(
            loss_sum=loss * self._rows,
            weight=torch.tensor(float(self._rows)),
            grad_norm=torch.stack(norms).square().sum().sqrt() if norms else None,
            metrics={name: value * self._rows for name, value in metrics.items()} if want_metrics else {},
        )

    def restore(self, state: TrainState | None, *, source: int | None) -> dict[str, Any]:
        meta = super().restore(state, source=source)
        self._end_step()
        return meta

    def recoverable_steps(self, step: int) -> RecoverableSteps:
        """Return the last step for every rank, as all are equal; nothing if a step was interrupted."""
        return {} if self._partly_updated else super().recoverable_steps(step)

    def recover_state(
        self, sources: Sequence[int], *, source_step: int, step: int, samples_consumed: int
    ) -> dict[str, Any]:
        meta = super().recover_state(sources, source_step=source_step, step=step, samples_consumed=samples_consumed)
        self._end_step()
        return meta

    def comm_ms(self) -> float | None:
        return self._waits.total_ms() if self._has_peers else None

    def _end_step(self) -> None:
        self.trained.in_step = self._updating = False

    @property
    def _has_peers(self) -> bool:
        return self.context.mesh.world_size > 1

    @property
    def _rows(self) -> int:
        """The number of samples in this rank's share of the batch."""
        context = self.context
        return even_shares(context.train.global_batch_size, context.mesh.data_parallel_size)[context.dp_rank]

    @property
    def _partly_updated(self) -> bool:
        """Whether a step was left after it had changed parameters, which cannot be undone."""
        return self.trained.in_step and (self._updating or self._frozen_versions() != self._frozen_versions_before)

    def _frozen_versions(self) -> Sequence[tuple[int, int]]:
        """Return what changes with the values of the parameters that no optimizer has, such as a teacher's."""
        return [(p.data_ptr() if p.layout == torch.strided else 0, version_of(p)) for p in self._frozen]

    @torch.no_grad()
    def _before_update(self, name: str, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Average the gradients of one optimizer over the ranks, measure and clip them. A hook of its ``step()``."""
        if len(args) > 1 or kwargs.get("closure") is not None:  # the first argument is the optimizer
            raise JobError(
                f"job.training_step: optimizers[{name!r}].step() was given a closure; call backward() before step()"
            )
        train = self.context.train
        parameters: list[nn.Parameter] = [p for group in optimizer.param_groups for p in group["params"]]
        if self._has_peers:
            with self._waits.waiting():
                weighted_sum_over(_world(), parameters, self._rows / train.global_batch_size, self.context.device)
        norm: Tensor | None = None
        if train.clip_norm is not None or self._wants_norm:
            norm = self._norms[name] = norm_over(None, parameters, self.context.device)
        clip(parameters, train, norm)
        self.hooks.confirm()
        self._updating = True

    def _share_buffers(self) -> None:
        """Replace the buffers by the buffers of rank 0."""
        with self._waits.waiting():
            broadcast_tensors(self.trained.buffers, source=0, device=self.context.device)
            self.hooks.confirm()


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _forget_casts(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Let autocast, which keeps casts of the weights until its end, cast the updated weights again."""
    torch.clear_autocast_cache()

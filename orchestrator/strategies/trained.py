"""What a rank trains: how an update of it is made, and the state of it that is saved."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from orchestrator.compat.modules import own_buffers
from orchestrator.compat.torch import copies_of, copy_all, multiply
from orchestrator.config.text import first_few
from orchestrator.job import Job, has_training_step
from orchestrator.model.tensor_slots import sparse_error
from orchestrator.planning.placement import Box, Placement
from orchestrator.state import train_state
from orchestrator.state.model_state import checksum, dropped_names, own_tensors
from orchestrator.state.train_state import TrainState
from orchestrator.strategies.constructor import Outline, changed_weights
from orchestrator.strategies.data.datasets import steps_per_epoch
from orchestrator.strategies.rank_context import Context
from orchestrator.strategies.training_step import joined
from orchestrator.strategies.update.gradients import clip
from orchestrator.strategies.update.job_optimizer import (
    ELEMENTWISE,
    MODE,
    Closure,
    closure_errors,
    evaluation_weights,
    fuse_updates,
    loading_in_mode,
    schedule_of,
    sparse_parameters,
    to_training,
    with_modes,
)
from orchestrator.strategies.update.weight_average import keep_average
from orchestrator.strategies.update.whole_tensors import ShardMap, WholeUpdate, computed
from orchestrator.user_code.errors import JobError
from orchestrator.user_code.results import kind_of, needs_closure


class Trained:
    """The modules of a rank, and what updates them.

    Attributes:
        module: returns a module with the tensors of this rank, under the model's own names.
        modules: the modules as they are called.
        placements: where the parameters are, by each of their names.
        boxes: those that this rank has of parameters that are divided, by name.
        parameters: the parameters that are updated.
        moving: the frozen parameters that forward passes change, such as those of a teacher.
        optimizer: updates them; several are joined for their state, and have to be called one by one.
        scheduler: the learning-rate schedule; None if it is constant.
        loss_scale: the factor of the loss in float16; None in another precision.
        in_step: whether a step has begun whose update has not been made, nor the step undone.
        settled: whether that update can still be made, if another rank makes its own.
        norm: of the gradient of the last step that has ended; None if it was not formed.
        needs_whole: whether updates are made of whole tensors of which this rank may have shards.
        needs_closure: whether the optimizer itself asks for the loss and the gradients, at several points.
        closure: what it asks then, of the batch of the present step.
    """

    def __init__(
        self,
        job: Job,
        context: Context,
        modules: Sequence[nn.Module],
        optimizers: Mapping[str, Optimizer],
        train_set: Dataset[Any],
        *,
        module: Callable[[], nn.Module] | None = None,
        placements: Mapping[str, Placement] | None = None,
    ):
        """Prepare ``optimizers``, by name, for the updates.

        ``module`` returns the first of ``modules`` by default, and all of ``placements`` are whole.
        """
        train = context.train
        epoch = steps_per_epoch(job, train_set, train)
        for optimizer in optimizers.values():
            if context.device.type == "cuda":
                fuse_updates(optimizer, sparse=sparse_parameters(modules))
            if train.ema_decay is not None:
                keep_average(optimizer, train.ema_decay)
        self.module = module or (lambda: modules[0])
        self.modules = modules
        own = self.module()
        self.placements = placements or {
            name: Placement(shape=tuple(p.shape)) for name, p in own.named_parameters(remove_duplicate=False)
        }
        boxes = {n: p.box(context.mesh, context.global_rank) for n, p in self.placements.items() if p.cuts}
        self.boxes = {name: box for name, box in boxes.items() if box is not None}
        self.parameters: Sequence[nn.Parameter] = [p for p in own.parameters() if p.requires_grad]
        self._untrained = {name: p for name, p in own.named_parameters() if not p.requires_grad}
        self.moving: Sequence[nn.Parameter] = ()
        _refuse_sparse(modules, saved=own_tensors(own), sent=context.mesh.world_size > 1)
        self.optimizer = cast(Optimizer, joined(optimizers))
        self.needs_whole = context.mesh.divides_tensors and type(self.optimizer) not in ELEMENTWISE
        to_training(self.optimizer)
        self.scheduler = schedule_of(job, [*optimizers.values()], train, steps_per_epoch=epoch)
        self.loss_scale = LossScale() if train.precision == "fp16" else None
        self.needs_closure = any(needs_closure(optimizer) for optimizer in optimizers.values())
        if self.needs_closure and (errors := closure_errors(self.optimizer, train, context.options)):
            raise JobError("; ".join(errors))
        if self.needs_closure and job.carried:
            raise JobError(
                f"Job.carried: {', '.join(job.carried)} would change at each point that the closure of "
                f"{kind_of(self.optimizer)} computes; use another optimizer, such as AdamW"
            )
        self.closure: Closure | None = None
        self.in_step = self.settled = False
        self.norm: Tensor | None = None
        self._update: WholeUpdate | None = None
        self._train = train
        if self._untrained and not has_training_step(job) and (self.may_skip or context.mesh.world_size > 1):
            changed = {*changed_weights(Outline(job, train), train_set)}
            self.moving = [p for name, p in self._untrained.items() if name in changed]
        self._kept: Sequence[Tensor] = ()
        self._state_before: dict[str, Any] = {}
        self._frozen: dict[str, int] = {}

    def use(self, modules: Sequence[nn.Module]) -> None:
        """Take other ``modules`` as they are called, of the same structure."""
        self.modules = modules
        vars(self).pop("_own_buffers", None)

    @property
    def buffers(self) -> Sequence[Tensor]:
        """The buffers on this rank. A layer may replace its own, so only the walk over the modules is cached."""
        every = (buffer for own in self._own_buffers for buffer in own.values() if buffer is not None)
        return list(dict.fromkeys(every))

    @functools.cached_property
    def _own_buffers(self) -> Sequence[Mapping[str, Tensor | None]]:
        return [own_buffers(module) for module in nn.ModuleList(self.modules).modules()]

    @property
    def may_skip(self) -> bool:
        """Whether a step may end without an update, because its gradients are not finite."""
        return self._train.on_nonfinite == "skip" or self.loss_scale is not None

    @property
    def needs_norm(self) -> bool:
        """Whether the update depends on the norm of the gradient."""
        return self._train.clip_norm is not None or self.may_skip

    @property
    def loss_factor(self) -> float:
        """What the loss is multiplied by, so that small gradients do not become zero in float16."""
        return 1.0 if self.loss_scale is None else self.loss_scale.factor

    def begin_step(self, *, has_peers: bool) -> None:
        """Begin a step without gradients. With peers, one of which may be lost, the step may have to be undone."""
        if self.may_skip or has_peers:
            self.keep()
        self.in_step, self.settled, self._update = True, False, None
        for parameter in self.parameters:
            parameter.grad = None

    def keep(self) -> None:
        """Copy the state that a step changes before its update, for :meth:`undo_step`."""
        self._kept = copies_of(self._changing, into=self._kept)
        if self.needs_closure:
            self._state_before = copy.deepcopy(self.optimizer.state_dict())

    @property
    def _changing(self) -> Sequence[Tensor]:
        return [*self.buffers, *self.moving, *(p.detach() for p in self.parameters if self.needs_closure)]

    def check_untrained(self) -> None:
        """Check, after the backward passes of a step, that what was frozen when the run began still is.

        Raises:
            JobError: no optimizer updates what is not.
        """
        if unfrozen := [name for name, p in self._untrained.items() if p.requires_grad or p.grad is not None]:
            raise JobError(
                f"job.model: {first_few(unfrozen, 2)} was frozen when the run began, so no optimizer updates it, and "
                "now needs a gradient; leave requires_grad on from the start, with a learning rate of 0 at first in "
                "Job.scheduler, or unfreeze it in Job.model for a new run (start_from)"
            )

    def unscale(self) -> None:
        """Divide the gradients by the factor of the loss."""
        if self.loss_scale is not None:
            multiply([p.grad for p in self.parameters if p.grad is not None], 1 / self.loss_scale.factor)

    def admits(self, norm: Tensor | None) -> bool:
        """Return whether to make the update, given the norm of the gradient; otherwise the step is undone.

        If the step may be skipped, the host waits for the device here. The norm is equal on all ranks, so that all skip
        the same steps.
        """
        scale, finite = self.loss_scale, self._is_finite(norm)
        admitted = finite or not self._skips_nonfinite
        if scale is not None:
            self.loss_scale = scale.after(finite=finite)
        if not admitted:
            self.undo_step()
        return admitted

    def _is_finite(self, norm: Tensor | None) -> bool:
        return not self.may_skip or norm is None or bool(torch.isfinite(norm))

    @property
    def _skips_nonfinite(self) -> bool:
        return self._train.on_nonfinite == "skip" or (self.loss_scale is not None and self.loss_scale.can_fall)

    def clip(self, norm: Tensor | None) -> None:
        """Clip the gradients of this rank, if the configuration asks for it and no update of them is computed yet."""
        if self._update is None:
            clip(self.parameters, self._train, norm)

    def compute_update(self, norm: Tensor | None, shard_map: ShardMap) -> None:
        """Compute the update of an optimizer that needs whole tensors, as :meth:`apply` makes it. Collective.

        Args:
            shard_map: how the parameters are divided.
        """
        if self._is_finite(norm) or not self._skips_nonfinite:
            self.clip(norm)
            self._update = computed(self.optimizer, shard_map)

    def drop_gradients(self) -> None:
        """Free the gradients, also those of the modules that have not become gradients of the parameters."""
        of_modules = (parameter for module in self.modules for parameter in module.parameters())
        for parameter in (*self.parameters, *of_modules):
            parameter.grad = None

    def undo_step(self) -> None:
        """Undo a step that made no update: restore the buffers that its forward passes changed.

        An optimizer that needs a closure changes parameters, and its own state, between these passes.
        """
        copy_all(self._kept, to=self._changing)
        if self.needs_closure:
            self.optimizer.load_state_dict(self._state_before)
        self.in_step, self.settled, self._update = False, False, None

    def apply(self) -> None:
        """Update the parameters, and the learning rate for the next step."""
        closure, self.closure = self.closure, None
        update, self._update = self._update, None
        if update is not None:
            update.make(self.optimizer)
        elif closure is None:
            self.optimizer.step()
        else:
            cast(Any, self.optimizer).step(closure)  # whose loss is a tensor
        self.schedule()

    def schedule(self) -> None:
        """Set the learning rate for the next step."""
        if self.scheduler is not None:
            self.scheduler.step()

    @functools.cached_property
    def dropped(self) -> Collection[str]:
        """The parameters that ``state_dict()`` of the model leaves out; frozen ones are not saved either."""
        return dropped_names(self.module())

    def frozen(self, wanted: Callable[[str], bool]) -> Mapping[str, int]:
        """Return the checksums of the ``wanted`` parameters that no optimizer updates, by each of their names."""
        updated = {p for group in self.optimizer.param_groups for p in group["params"]}
        every = self.module().named_parameters(remove_duplicate=False)
        own = {name: p for name, p in every if p not in updated and wanted(name)}
        for name in own.keys() - self._frozen.keys():
            self._frozen[name] = checksum(own[name], self.boxes.get(name) or Box.whole(own[name].shape))
        return {name: self._frozen[name] for name in own}

    def snapshot(
        self,
        *,
        step: int,
        samples_consumed: int,
        into: TrainState | None = None,
        live: bool = False,
        left_out: Mapping[str, int] | None = None,
    ) -> TrainState:
        """Return this rank's part of the training state: a copy in host memory, or the ``live`` tensors.

        Args:
            into: an old snapshot whose memory is reused.
            left_out: what :meth:`frozen` returned, to leave that out.
        """
        return train_state.capture(
            self.module(),
            self.optimizer,
            self.scheduler,
            step=step,
            samples_consumed=samples_consumed,
            into=into,
            live=live,
            boxes=self.boxes,
            marked=self.needs_whole,
            left_out=left_out,
            **({} if self.loss_scale is None else {"loss_scale": self.loss_scale.state()}),
        )

    def to_save(
        self, *, step: int, samples_consumed: int, into: TrainState | None, left_out: Mapping[str, int]
    ) -> TrainState:
        """Return this rank's part of the state for a checkpoint, with the weights to evaluate, as :meth:`snapshot`."""
        with evaluation_weights(self.optimizer):
            state = self.snapshot(step=step, samples_consumed=samples_consumed, into=into, left_out=left_out)
        if with_modes(self.optimizer):
            state.meta[MODE] = "eval"
        return state

    def load(self, state: TrainState, *, partial: bool = False, consume: bool = False) -> None:
        """Load this rank's part of ``state``, which has more parts if ``partial``, as ``train_state.restore`` does."""
        self._frozen.clear()
        with loading_in_mode(self.optimizer, state.meta.get(MODE)):
            train_state.restore(
                state,
                self.module(),
                self.optimizer,
                self.scheduler,
                partial=partial,
                consume=consume,
                boxes=self.boxes,
                marked=self.needs_whole,
            )
        if self.loss_scale is not None:
            self.loss_scale = LossScale.of_state(state.meta.get("loss_scale"))


def _refuse_sparse(modules: Sequence[nn.Module], *, saved: Collection[str], sent: bool) -> None:
    """Refuse sparse buffers that are ``saved``, and also others if they are ``sent`` to other ranks."""
    buffers = [(name, buffer) for module in modules for name, buffer in module.named_buffers()]
    if sparse := [n for n, buffer in buffers if buffer.layout is not torch.strided and (sent or n in saved)]:
        raise JobError(sparse_error(sparse))


INITIAL = 2.0**16
GROWTH_STEPS = 2000
"""The number of updates in a row after which the factor is doubled."""


@dataclass(frozen=True)
class LossScale:
    """The factor of the loss in float16, always a power of two, and the number of updates since it last changed.

    Micikevicius et al., ICLR 2018, "Mixed Precision Training", with the constants of ``torch.amp.GradScaler``. That
    class decides on each rank by the gradients there whether to update. Here the caller decides, once for all ranks.
    """

    factor: float = INITIAL
    updates: int = 0

    @property
    def can_fall(self) -> bool:
        """Whether a smaller factor may make infinite gradients finite; at 1, they come from the loss itself."""
        return self.factor > 1

    def after(self, *, finite: bool) -> LossScale:
        """Return the scale for the next step, given whether the gradient of this one was finite."""
        if not finite:
            return LossScale(max(1.0, self.factor / 2))
        if self.updates + 1 == GROWTH_STEPS:
            return LossScale(self.factor * 2)
        return LossScale(self.factor, self.updates + 1)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, as JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def of_state(cls, state: Mapping[str, Any] | None) -> LossScale:
        """Return the scale that a checkpoint has; the initial one if it is of a run in another precision."""
        return cls() if state is None else cls(**state)

"""The strategy of every product of dimensions, put together from four slots.

These are what of a sample and of the layers a rank computes, what it has of the model, how gradients are summed, and
which elements it updates. Where no rank has a part alone, the state is that of :class:`Trainer`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from orchestrator.compat.generators import kept_generators
from orchestrator.config.schema import Config
from orchestrator.job import Job
from orchestrator.model.precision import Precision, gathered_share
from orchestrator.planning.memory import size_text
from orchestrator.planning.mesh import Mesh
from orchestrator.planning.plan import Plan
from orchestrator.planning.schedules import SCHEDULES
from orchestrator.protocol.events import StageSummary
from orchestrator.protocol.messages import RecoverableSteps
from orchestrator.protocol.metrics import Metric, MetricSpec, measured, wait_metric
from orchestrator.state.train_state import TrainState
from orchestrator.state.transport import CPU, broadcast_state
from orchestrator.strategies.data.batch_parts import (
    BatchDivision,
    by_keys,
    mean_loss,
    not_compared,
    warning_about_parts,
)
from orchestrator.strategies.groups import MeshGroups
from orchestrator.strategies.kept_state import KeptState
from orchestrator.strategies.keys import MeshConfig
from orchestrator.strategies.measure.device import TensorSize, WaitTimer, free_memory, sizes_of
from orchestrator.strategies.measure.job_metrics import EvalSums, SumCheck, train_metrics
from orchestrator.strategies.owner import Own, Shards
from orchestrator.strategies.parts.part import ModelPart
from orchestrator.strategies.parts.shard_options import gathered_at_once
from orchestrator.strategies.rank_context import Context
from orchestrator.strategies.recovery import Recovery
from orchestrator.strategies.reduction import Reduction
from orchestrator.strategies.replicated.comm_hooks import PowerSGD
from orchestrator.strategies.saving import gathered, own_share, saves
from orchestrator.strategies.slots import Slots, slots_of
from orchestrator.strategies.sums.mesh_reduction import MeshReduction
from orchestrator.strategies.sums.sums import Sums
from orchestrator.strategies.trained import Trained
from orchestrator.strategies.trainer import Trainer
from orchestrator.strategies.transforms.every import divides_layers, own_parts
from orchestrator.strategies.transforms.part import Parts
from orchestrator.strategies.whole_model import WholeModel
from orchestrator.timeline import Span

COMPARED_BYTES = 2**30
"""The size of a model that rank 0 builds in a second or two, to compare a batch with its halves."""
ALL_REDUCE_MS = wait_metric("all_reduce")
_OUTSIDE = (
    "If code of forward() between the layers uses an autograd function, a reentrant checkpoint or autocast, or keeps "
    "tensors for its next call, put it into an nn.Module; otherwise cut elsewhere with strategy.split, define "
    "Job.stages, or make job.model() an nn.Sequential"
)
"""What a recording of the code between the layers misses."""


def part_class(slots: Slots) -> type[ModelPart]:
    """Return the class of the part. Only one is needed, and each imports another part of torch."""
    module, _, name = slots.part.partition(":")
    found: type[ModelPart] = getattr(importlib.import_module(f"{__package__}.parts.{module}"), name)
    return found


class MeshTrainer(Trainer):
    """The strategy of every product of the dimensions of a mesh. Not to be subclassed: its slots make the difference.

    Attributes:
        part: what of the model is on this rank.
        parts: what of each sample and of the layers it computes, where several ranks do so together.
        sums: how the gradients of a step are summed first, while there is a process group.
        owner: the elements that this rank updates.
        recovery: what ranks that have parts do for each other.
    """

    compares_whole = True
    parts = Parts()
    sums: Sums | None = None
    owner: Own
    _train_set: Dataset[Any] | None = None  # until what is trained is built

    def __init__(self, context: Context, job: Job):
        super().__init__(context, job)
        self.slots = slots_of(context.options, context.mesh)
        self.divides_model = self.moves_parameters = self.slots.moves_parameters
        self.evaluates_padding, self.cuts_batches = self.slots.gathers, self.slots.stages
        self.part = part_class(self.slots)(context, job, self.precision)
        self.recovery = Recovery(self)
        self.reassign(context)

    @classmethod
    def why_not_compiled(cls, plan: Plan) -> str | None:
        if plan.pipeline is None or not SCHEDULES[plan.pipeline.schedule].splits_backward:
            return None
        name = plan.pipeline.schedule
        return f"{name} computes backward passes in halves, and compiled code cannot; use strategy.schedule=1F1B"

    @classmethod
    def gathered_bytes(cls, config: Config, mesh: Mesh, model: nn.Module) -> float:
        slots = slots_of(config.strategy, mesh)
        if not slots.gathers:
            return 0.0
        options = MeshConfig.of(config.strategy)
        share = gathered_share(model, Precision.named(config.train.precision, "cpu").autocast_dtype)
        if not slots.stages or options.reshard_after_forward:
            return gathered_at_once(options, model, share=share)
        return share * sum(p.nbytes for p in model.parameters()) / mesh.pipeline

    def reassign(self, context: Context) -> None:
        super().reassign(context)
        self.part.reassign(context)
        if context.pipeline is not None:
            # Of the second halves, it is not known which operations the workers of a layer divide.
            splits = SCHEDULES[context.pipeline.schedule].splits_backward
            self.counts_flops = not (splits and divides_layers(context.mesh))
            stages = context.pipeline.stages_of(context.pp_rank)
            self.reads_data = 0 in stages or context.pipeline.num_stages - 1 in stages

    # Set-up

    def setup(self, train_set: Dataset[Any]) -> None:
        context, part = self.context, self.part
        self.parts = own_parts(context, self.job, train_set)
        part.setup(context, self.parts, train_set)
        if part.job_of_part is not self.job:
            self._train_metrics = SumCheck("train_metrics", functools.partial(train_metrics, part.job_of_part))
        if part.is_built_alone:
            self.check_hooks(part.outline)
        if not self.slots.stages:  # which are not built yet
            self.passes = part.passes
        self._warnings = self.notes_on(part.outline, train_set)
        self._train_set = train_set
        if part.is_built_alone:
            self._complete(train_set)

    def _complete(self, train_set: Dataset[Any]) -> None:
        """Build what is left, and prepare for its updates."""
        part = self.part
        part.complete(self.context, train_set)
        owner = self.owner = part.owner(self.context, divides=self.slots.divides_optimizer)
        self.trained = Trained(
            self.job,
            self.context,
            part.modules,
            {"": part.optimizer(owner)},
            train_set,
            module=owner.module,
            placements=owner.placements,
        )
        self.trained.moving = owner.whole_of(self.trained.moving)
        part.prepare_sums(self.context)
        if self.slots.stages:
            self.check_hooks(part.module(), num_microbatches=part.num_microbatches, shared=part.shares_tensors)
        self._train_set = None

    def warning_about(self, division: BatchDivision, model: nn.Module, train_set: Dataset[Any]) -> str | None:
        """Compare a batch with its halves in the whole model, which rank 0 builds for this unless it is large.

        Beside the parameters, there are two sets of gradients and activations.
        """
        context = self.context
        if not self.divides_model:
            return super().warning_about(division, model, train_set)
        size = self.parts.count * sum(parameter.nbytes for parameter in model.parameters())  # of what is divided
        limit = min(COMPARED_BYTES, *(free_memory(device) // 4 for device in (CPU, context.device)))
        if size > limit:
            return not_compared(
                division, f"rank 0 would build the whole model of {size_text(size)}, more than {size_text(limit)}"
            )
        with kept_generators(context.device):
            whole = WholeModel(self.job, context, self.precision)
        return warning_about_parts(
            whole.model,
            self.job,
            train_set,
            division,
            device=context.device,
            precision=self.precision,
            seed=context.seed,
            loss=mean_loss(self.job),
        )

    def _division(self) -> BatchDivision | None:
        if not self.slots.stages:
            return super()._division()
        context, microbatches = self.context, self.part.num_microbatches
        replicas, slices = context.mesh.data_parallel_size, context.train.grad_accumulation
        if replicas * slices * microbatches == 1:
            return None
        return BatchDivision(
            by=by_keys(
                context.options.name,
                num_workers=context.mesh.num_workers if replicas > 1 else 1,
                num_microbatches=microbatches,
                grad_accumulation=slices,
            ),
            rows=self.eval_batch_size // microbatches,
            in_turn=slices * microbatches > 1,
            cut=replicas * slices == 1,
        )

    def attach(self) -> None:
        """Undo an interrupted step, and connect this rank with those that have other parts, or copies of its own."""
        context, part, groups = self.context, self.part, MeshGroups(self.context)
        part.meet(context, groups)
        if self._train_set is not None:
            self._complete(self._train_set)
        super().attach()  # frees gradients before the model is divided
        self.recovery.attach()
        self.parts.connect(groups.over, context.device)
        part.divide(context, groups, self.trained)
        self._begin_sums(groups)

    def _begin_sums(self, groups: MeshGroups) -> None:
        """Prepare for the sums of this generation. Collective."""
        context, part = self.context, self.part
        self.sums = part.sums(context, groups, self.owner)
        sharing = part.sharing
        self.reduction = MeshReduction(context, self.trained, groups, self.sums, owner=self.owner, sharing=sharing)
        part.connect(context, groups, self.sums)
        self.passes = part.passes

    def share_parameters(self) -> None:
        self.owner.exchange()

    def sync_initial_state(self) -> None:
        super().sync_initial_state()
        self.owner.exchange()

    def stage_summaries(self) -> tuple[StageSummary, ...]:
        return self.part.stage_summaries()

    # The step

    @contextlib.contextmanager
    def around_step(self, *, logged: bool) -> Iterator[None]:
        """Measure the step, if it is logged; evaluations wait too, and those times are not reported."""
        assert self.sums is not None
        self.part.begin_step(logged=logged)
        self.sums.restart(counts=logged)
        timers = self.timers.values()
        for timer in timers:
            timer.restart(counts=logged)
        try:
            self.part.gather_for_step()
            yield
        finally:
            for timer in timers:
                timer.pause()

    def apply(self) -> None:
        self.owner.take_frozen()
        super().apply()

    def end_step(self, norm: Tensor | None) -> bool:
        if admitted := super().end_step(norm):
            self.recovery.ahead = 1  # if the exchange fails, the step is not counted, but this rank's part is updated
            self.owner.exchange(trained=True)
            self.recovery.ahead = 0
        elif self._powersgd is not None:
            self._powersgd.forget()
        return admitted

    def after_step(self, *, step: int, samples_consumed: int) -> None:
        self.recovery.after_step(step=step, samples_consumed=samples_consumed)

    # Reporting

    @property
    def timers(self) -> Mapping[MetricSpec, WaitTimer]:
        """What a step waits for, by metric."""
        timers, reduction = dict(self.part.timers), self.reduction
        if isinstance(reduction, MeshReduction) and (reduction.batch is not None or self.parts.count > 1):
            timers |= {} if self.slots.has_buckets else {ALL_REDUCE_MS: reduction.waits}  # DDP measures its own
        return {**timers, **self.parts.timers(self.context.train)}

    def comm_ms(self) -> float | None:
        if timers := self.timers.values():
            return math.fsum(timer.total_ms() for timer in timers)
        return None if self.sums is None else self.sums.comm_ms()

    def metrics(self) -> Mapping[str, Metric]:
        return {**super().metrics(), **measured({spec: timer.total_ms() for spec, timer in self.timers.items()})}

    def spans(self) -> tuple[Span, ...]:
        return self.part.spans()

    def flop_share(self) -> float:
        return self.parts.flop_share()

    def tensor_sizes(self) -> Iterable[TensorSize]:
        own = [*super().tensor_sizes()]
        if not isinstance(self.owner, Shards):
            return own
        of_shards = [size for size in own if size.kind == "optimizer state"]
        whole = sizes_of(self.part.module(), self.trained.optimizer)
        return [*of_shards, *(size for size in whole if size not in of_shards)]

    # Evaluation, and the comparison with the whole model

    @property
    def eval_batch_size(self) -> int:
        return self.part.eval_batch_size(super().eval_batch_size)

    def evaluate(self, batch: Any, valid: int) -> EvalSums:
        with self.part.gathered():
            return super().evaluate(batch, valid)

    @contextlib.contextmanager
    def averaged_weights(self) -> Iterator[None]:
        with super().averaged_weights():
            self.owner.exchange(trained=True)
            yield
        self.owner.exchange(trained=True)

    @property
    def own_model(self) -> nn.Module | None:
        return None if self.divides_model else self.part.module()

    @property
    def kept(self) -> Sequence[object]:
        return self.job, self.part.job_of_part

    @property
    def compares_together(self) -> bool:
        return getattr(self.context.options, "sync_batchnorm", False)

    @property
    def compared_slices(self) -> tuple[int, int, int]:
        if self.context.pipeline is not None:
            microbatches = self.context.pipeline.num_microbatches
            return (2 if microbatches == 1 else 1), self.eval_batch_size, microbatches
        slices, rows, parts = super().compared_slices
        return (1 if getattr(self.context.options, "static_graph", False) else slices), rows, parts

    @property
    def compared_dtypes(self) -> Sequence[torch.dtype]:
        hook = getattr(self.context.options, "comm_hook", "none")
        in_hook = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(hook)
        return [*super().compared_dtypes, *filter(None, [in_hook])]

    @property
    def remedy(self) -> str:
        if self.slots.stages:
            return f"{_OUTSIDE}. {super().remedy}"
        if not self.slots.has_buckets or getattr(self.context.options, "find_unused_parameters", False):
            return super().remedy
        return (
            "If samples use different parameters, set strategy.find_unused_parameters=true; otherwise use "
            "strategy=single"
        )

    @contextlib.contextmanager
    def comparing(self) -> Iterator[Callable[[], None]]:
        kept = KeptState((), (), others=[*filter(None, [self._powersgd])])
        try:
            if self._powersgd is not None:
                self._powersgd.load_state({}, steps=0)  # whose first steps sum whole gradients
            with super().comparing() as restore:
                yield restore
        finally:
            kept.restore()

    def renew_sums(self) -> None:
        if self.sums is not None and self.sums.learns:
            self.sums.close()
            self._begin_sums(MeshGroups(self.context))

    @property
    def _powersgd(self) -> PowerSGD | None:
        return self.part.powersgd

    # What is saved

    @property
    def writers(self) -> Sequence[int]:
        return self.context.mesh.replicas[0]

    @property
    def saved_names(self) -> Sequence[str]:
        return self.part.saved_names if self.context.mesh.is_divided else ()

    def frozen(self) -> Mapping[str, int]:
        """Return the checksums of parameters under the names by which no rank before this one has them."""
        elsewhere = self.part.sharing.saved_elsewhere
        return self.trained.frozen(lambda name: name not in elsewhere and saves(name, self.trained, self.context))

    def capture_part(self, *, step: int, samples_consumed: int, into: TrainState | None) -> TrainState | None:
        if self.context.global_rank not in self.writers:
            return None
        state = self.trained.to_save(step=step, samples_consumed=samples_consumed, into=into, left_out=self.left_out)
        return own_share(state, self.part, self.trained, self.context)

    def capture(self, *, step: int, samples_consumed: int, into: TrainState | None) -> TrainState | None:
        if self.context.mesh.is_divided:
            own = self.capture_part(step=step, samples_consumed=samples_consumed, into=None)
            return gathered(own, self.part, self.context)
        # The errors of PowerSGD are the one state that differs by rank; their mean is saved. Collective.
        tensors = {} if self._powersgd is None else self._powersgd.state()
        state = super().capture(step=step, samples_consumed=samples_consumed, into=into)
        if state is not None:
            # No parameter has these names, so other strategies ignore the tensors.
            state.optimizer.update({name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()})
        return state

    def gather_model(self) -> Mapping[str, Tensor] | None:
        own = None
        if self.context.global_rank in self.writers:
            live = self.trained.snapshot(step=0, samples_consumed=0, live=True)
            own = own_share(replace(live, optimizer={}), self.part, self.trained, self.context)
        whole = gathered(own, self.part, self.context)
        return None if whole is None else whole.model

    def restore_part(self, state: TrainState) -> dict[str, Any]:
        self.load(state, partial=self.context.mesh.pipeline > 1)
        self.owner.exchange()
        return state.meta

    def load(self, state: TrainState, *, partial: bool = False, consume: bool = True) -> None:
        if self._powersgd is not None:
            self._powersgd.load_state(state.optimizer, steps=state.step)
        super().load(state, partial=partial, consume=consume)

    def restore(self, state: TrainState | None, *, source: int) -> dict[str, Any]:
        if not self.context.mesh.is_divided:
            return super().restore(state, source=source)
        wanted = {*self.trained.module().state_dict(), *self.part.sharing.first_names.values()}
        has_all = self.context.mesh.pipeline == 1  # so that a tensor that is not wanted is of another model
        return self.restore_part(
            broadcast_state(
                state,
                source=source,
                rank=self.context.global_rank,
                device=self.context.device,
                keep=lambda name: has_all or name in wanted,
                boxes=self.trained.boxes,
            )
        )

    # State and recovery

    def recoverable_steps(self, step: int) -> RecoverableSteps:
        if not self.context.mesh.is_divided:
            return {} if self._powersgd is not None else super().recoverable_steps(step)
        return {} if self._train_set is not None else self.recovery.offered(step)  # unless nothing is built yet

    def recover_state(
        self, sources: Sequence[int], *, source_step: int, step: int, samples_consumed: int
    ) -> dict[str, Any]:
        recover = self.recovery.recover if self.context.mesh.is_divided else super().recover_state
        return recover(sources, source_step=source_step, step=step, samples_consumed=samples_consumed)

    def close(self) -> None:
        """Release what refers to the process groups, and stop exchanging copies. Existing copies are kept."""
        if self.sums is not None:
            self.sums.close()
        self.part.close()
        self.sums, self.reduction = None, Reduction()
        super().close()
        self.recovery.detach()
        self.parts.close(self.context.device)
        if hasattr(self, "owner"):  # otherwise setup() has failed, or nothing is built yet
            self.owner.group = None

"""The strategy of every product of dimensions, put together from four slots.

They say how a rank divides samples and layers with others, which part of the model it has, how gradients are summed,
and the elements that it updates. Where no rank has a part alone, the state is that of :class:`Trainer`.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from orchestrator.compat.generators import kept_generators
from orchestrator.job import Job
from orchestrator.planning.memory import size_text
from orchestrator.planning.schedules import SCHEDULES
from orchestrator.protocol.events import StageSummary
from orchestrator.protocol.messages import RecoverableSteps
from orchestrator.protocol.metrics import Metric, MetricSpec, measured, wait_metric
from orchestrator.state.train_state import TrainState
from orchestrator.state.transport import CPU
from orchestrator.strategies.base import Saved, Traits
from orchestrator.strategies.data.batch_parts import BatchDivision, Remark, not_compared
from orchestrator.strategies.groups import MeshGroups
from orchestrator.strategies.kept_state import KeptState
from orchestrator.strategies.measure.device import TensorSize, WaitTimer, free_memory, sizes_of
from orchestrator.strategies.measure.job_metrics import EvalSums, SumCheck, train_metrics
from orchestrator.strategies.owner import Own, Shards
from orchestrator.strategies.rank_context import Context
from orchestrator.strategies.recovery import Recovery
from orchestrator.strategies.reduction import Reduction
from orchestrator.strategies.replicated.comm_hooks import PowerSGD
from orchestrator.strategies.saving import Saving
from orchestrator.strategies.slots import slots_of
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


class MeshTrainer(Trainer):
    """The strategy of every product of the dimensions of a mesh. Not to be subclassed: its slots make the difference.

    Attributes:
        part: what of the model is on this rank.
        parts: what of each sample and of the layers it computes, where several ranks do so together.
        sums: how the gradients of a step are summed first, while there is a process group.
        owner: the elements that this rank updates.
        recovery, saving: how ranks with parts replace each other, and what each of them saves.
    """

    compares_whole = True
    parts = Parts()
    sums: Sums | None = None
    owner: Own
    _train_set: Dataset[Any] | None = None  # until what is trained is built

    def __init__(self, context: Context, job: Job):
        super().__init__(context, job)
        self.slots = slots_of(context.options, context.mesh)
        self.traits = Traits(
            divides_model=self.slots.moves_parameters,
            moves_parameters=self.slots.moves_parameters,
            evaluates_padding=self.slots.gathers,
            cuts_batches=self.slots.stages,
        )
        self.part = self.slots.part_class(context, job, self.precision)
        self.recovery, self.saving = Recovery(self), Saving(self)
        self.reassign(context)

    def reassign(self, context: Context) -> None:
        super().reassign(context)
        self.part.reassign(context)
        if context.pipeline is not None:
            # Of the second halves, it is not known which operations the workers of a layer divide.
            splits = SCHEDULES[context.pipeline.schedule].splits_backward
            stages = context.pipeline.stages_of(context.pp_rank)
            self.traits = replace(
                self.traits,
                counts_flops=not (splits and divides_layers(context.mesh)),
                reads_data=0 in stages or context.pipeline.num_stages - 1 in stages,
            )

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

    def warning_about(self, division: BatchDivision, model: nn.Module, train_set: Dataset[Any]) -> Remark | None:
        """Compare a batch with its halves in the whole model, which rank 0 builds for this unless it is large.

        Beside the parameters, there are two sets of gradients and activations.
        """
        context = self.context
        if not self.traits.divides_model:
            return super().warning_about(division, model, train_set)
        size = self.parts.count * sum(parameter.nbytes for parameter in model.parameters())  # of what is divided
        limit = min(COMPARED_BYTES, *(free_memory(device) // 4 for device in (CPU, context.device)))
        if size > limit:
            return not_compared(
                division, f"rank 0 would build the whole model of {size_text(size)}, more than {size_text(limit)}"
            )
        with kept_generators(context.device):
            whole = WholeModel(self.job, context, self.precision)
        return self.warning_of(whole, division, train_set)

    @property
    def num_microbatches(self) -> int:
        return self.part.num_microbatches

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
    def weights_to_evaluate(self, *, averaged: bool = False) -> Iterator[None]:
        with super().weights_to_evaluate(averaged=averaged):
            if averaged:
                self.owner.exchange(trained=True)
            yield
        if averaged:
            self.owner.exchange(trained=True)

    @property
    def own_model(self) -> nn.Module | None:
        return None if self.traits.divides_model else self.part.module()

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
        if self.part.remedy:
            return f"{self.part.remedy}. {super().remedy}"
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
    def saved(self) -> Saved:
        mesh = self.context.mesh
        return Saved(writers=mesh.replicas[0], names=self.part.saved_names if mesh.is_divided else ())

    def frozen(self) -> Mapping[str, int]:
        return self.trained.frozen(self.saving.is_first_with)

    def capture(
        self, *, step: int, samples_consumed: int, into: TrainState | None, part: bool = False
    ) -> TrainState | None:
        if part or self.context.mesh.is_divided:
            own = self.saving.share(step=step, samples_consumed=samples_consumed, into=into if part else None)
            return own if part else self.saving.gathered(own)
        # The errors of PowerSGD are the one state that differs by rank; their mean is saved. Collective.
        tensors = {} if self._powersgd is None else self._powersgd.state()
        state = super().capture(step=step, samples_consumed=samples_consumed, into=into)
        if state is not None:
            # No parameter has these names, so other strategies ignore the tensors.
            state.optimizer.update({name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()})
        return state

    def gather_model(self) -> Mapping[str, Tensor] | None:
        whole = self.saving.gathered(self.saving.live_model())
        return None if whole is None else whole.model

    def load(self, state: TrainState, *, partial: bool = False, consume: bool = True) -> None:
        if self._powersgd is not None:
            self._powersgd.load_state(state.optimizer, steps=state.step)
        super().load(state, partial=partial, consume=consume)

    def restore(self, state: TrainState | None, *, source: int | None) -> dict[str, Any]:
        if source is not None and not self.context.mesh.is_divided:
            return super().restore(state, source=source)
        state = state if source is None else self.saving.sent(state, source=source)
        assert state is not None
        self.load(state, partial=self.context.mesh.pipeline > 1)
        self.owner.exchange()
        return state.meta

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

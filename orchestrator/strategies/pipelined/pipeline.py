"""``model_parallel``, ``pipeline`` and ``ddp_pipeline``: the model is cut into stages, each replica is a pipeline.

Each rank builds and trains only its own stages. Activations and their gradients are sent point to point between
neighbouring stages, one micro-batch at a time; the rank of the last stage owns the loss. ``model_parallel`` is the
naive split with one micro-batch. With several replicas, the gradients of each stage are summed over them once a step,
after its last backward pass: the zero-bubble schedules bypass the hooks of ``DistributedDataParallel``. The loss of a
micro-batch is weighted by its share of the global weight, so that the summed gradients equal those of ``single``.

Schedules: GPipe (Huang et al., NeurIPS 2019), 1F1B (PipeDream: Narayanan et al., SOSP 2019; with a flush: ICML 2021),
Interleaved1F1B (Narayanan et al., SC 2021), LoopedBFS (Lamy-Poirier, MLSys 2023), InterleavedZeroBubble and
ZBVZeroBubble (Qi et al., ICLR 2024), DualPipeV (after DualPipe: DeepSeek-V3 technical report, 2024).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

from orchestrator.compat.pipelining import sends_one_way
from orchestrator.config.schema import Config
from orchestrator.job import Job
from orchestrator.model.batch import to_device
from orchestrator.model.cut import Cut, balance, cut_at
from orchestrator.model.partial_init import build_fake
from orchestrator.model.stages import Shared, Stage, state_of
from orchestrator.planning.mesh import DENSE, TOKENS, even_shares
from orchestrator.planning.placement import Placement
from orchestrator.planning.plan import Plan
from orchestrator.planning.schedules import SCHEDULES
from orchestrator.protocol.events import StageSummary
from orchestrator.protocol.messages import RecoverableSteps
from orchestrator.state.transport import CPU
from orchestrator.strategies.constructor import Outline, diverging_errors
from orchestrator.strategies.data.datasets import example_batch
from orchestrator.strategies.groups import NOTHING_SHARED, MeshGroups, Sharing, divided
from orchestrator.strategies.keys import StagedConfig
from orchestrator.strategies.owner import Own, cuts_of
from orchestrator.strategies.part_trainer import PartTrainer
from orchestrator.strategies.pipelined.chain import Chain
from orchestrator.strategies.pipelined.stage_builder import StageBuilder, compare_with_whole, recorded_call
from orchestrator.strategies.pipelined.stage_checks import check_stages
from orchestrator.strategies.pipelined.timed_stage import TimedStage
from orchestrator.strategies.rank_context import Context
from orchestrator.strategies.reduction import Reduction
from orchestrator.strategies.replicated.optimizer_shards import check_optimizer_shards
from orchestrator.strategies.sharded.shard_options import part_errors
from orchestrator.strategies.sums.mesh_reduction import MeshReduction
from orchestrator.strategies.sums.of_stages import OfStages
from orchestrator.strategies.sums.sums import Sums
from orchestrator.strategies.trained import Trained
from orchestrator.strategies.transforms.blocks import compile_in_place
from orchestrator.strategies.transforms.every import check_parts, divides_layers
from orchestrator.timeline import Span


class Pipeline(PartTrainer):
    """The stages of one rank."""

    passes: Chain
    cuts_batches = True
    divides_model = True
    moves_parameters = True

    @classmethod
    def check_job(cls, config: Config, outline: Outline, plan: Plan, errors: list[str]) -> tuple[str, ...]:
        assert plan.pipeline is not None
        schedule, before = SCHEDULES[plan.pipeline.schedule], len(errors)
        if config.train.activation_checkpointing == "selective" and schedule.splits_backward:
            errors.append(
                f"train.activation_checkpointing=selective: {schedule.name} computes backward passes in halves, and "
                "what is kept serves only one; set it to blocks, or use strategy.schedule=1F1B"
            )
        errors += diverging_errors(outline.model, plan)
        if divides_layers(plan.mesh) and plan.mesh.shard == 1:
            errors += part_errors(config, outline)
        notes = (*check_stages(config, outline, plan, errors), *check_parts(config, outline, plan, errors))
        if len(errors) == before and getattr(config.strategy, "shard_optimizer", False):
            check_optimizer_shards(outline, plan, errors)  # its note is on whole models
        return notes

    @classmethod
    def why_not_compiled(cls, plan: Plan) -> str | None:
        assert plan.pipeline is not None
        name = plan.pipeline.schedule
        if not SCHEDULES[name].splits_backward:
            return None
        return f"{name} computes backward passes in halves, and compiled code cannot; use strategy.schedule=1F1B"

    def __init__(self, context: Context, job: Job):
        super().__init__(context, job)
        self.reassign(context)
        self._builder: StageBuilder | None = None  # from setup() until the stages are built
        self._train_set: Dataset[Any] | None = None  # like the builder
        self._cut: Cut | None = None  # None until the stages are built
        self.stages: Sequence[Stage] = ()
        self._shared: Sequence[Shared] = ()
        self._costs: Sequence[float] | None = None

    def reassign(self, context: Context) -> None:
        super().reassign(context)
        assert context.pipeline is not None
        self.layout = context.pipeline
        train = context.train
        share = even_shares(train.global_batch_size, context.mesh.data_parallel_size)[context.dp_rank]
        self._rows = share // train.grad_accumulation // self.layout.num_microbatches
        self._own = self.layout.stages_of(context.pp_rank)
        # Of the second halves, it is not known which operations the workers of a layer divide.
        self.counts_flops = not (divides_layers(context.mesh) and SCHEDULES[self.layout.schedule].splits_backward)
        self.reads_data = 0 in self._own or self.layout.num_stages - 1 in self._own

    def setup(self, train_set: Dataset[Any]) -> None:
        """Outline the model. :meth:`attach` builds the stages, once the ranks have agreed on the cut."""
        context, self._train_set = self.context, train_set
        self.find_parts(train_set)
        inputs, target = to_device(example_batch(self.job, train_set, self._rows), context.device)
        self._builder = StageBuilder.outline(
            self.job_of_part,
            self.parts.begin(self.job, inputs),
            target,
            constructor=self.constructor(),
            split=self._split() or (),
            num_stages=self.layout.num_stages,
            device=context.device,
            seed=context.seed,
            precision=self.precision,
            call=recorded_call(self.job),
        )
        self._layers = self._builder.sequence.layers
        self._names = self._builder.sequence.saved_names
        self._unused = self._builder.sequence.unused

    def attach(self) -> None:
        context = self.context
        mesh, groups = context.mesh, MeshGroups(context)
        pipeline = groups.over("pipeline")
        backward = divided(context, mesh.groups("pipeline")) if self._has_backward_group() else pipeline
        assert pipeline is not None
        assert backward is not None
        cut = self._agree_on_cut()
        if self._builder is not None and self._train_set is not None:
            if self.context.global_rank == 0:
                self._warnings = compare_with_whole(
                    self._builder,
                    self.parts.job(self.job, by_rows=False),
                    self._train_set,
                    context=context,
                    precision=self.precision,
                    rows=self._rows,
                )
            self._build(self._builder, self._train_set, cut)
            self.check_hooks(self.undivided(), num_microbatches=self.layout.num_microbatches, shared=bool(self._shared))
            self._builder = self._train_set = None
        super().attach()
        self._sharing = Sharing.of(
            self._shared,
            self.trained.module().state_dict(keep_vars=True),
            context=context,
            stage_ranks=self.layout.stage_ranks,
        )
        on_cpu = context.device.type == "cpu"
        self._host = None if on_cpu else divided(context, mesh.replicas, backend="gloo")
        sums = self._sums(groups)
        self.owner.group = groups.over(*DENSE) if self.divides_optimizer else None
        self.reduction = MeshReduction(context, self.trained, groups, sums, owner=self.owner, sharing=self._sharing)
        self.passes = Chain(
            self.stages,
            self.layout,
            job=self.job_of_part,
            parts=self.parts,
            rows=self._rows,
            device=context.device,
            group=pipeline,
            precision=self.precision,
            sums=sums,
            backward_group=backward,
        )
        self.parts.connect(groups.over, context.device)

    @contextlib.contextmanager
    def around_step(self, *, logged: bool) -> Iterator[None]:
        """Record when the stages compute, and what they wait for, if the step is logged."""
        self.passes.clock.restart(records=logged)
        with super().around_step(logged=logged):
            yield

    def _sums(self, groups: MeshGroups) -> Sums:
        """Return the sums that begin in the backward passes."""
        named = self.undivided().named_parameters()
        needed = {p: n for n, p in named if p.requires_grad and n not in self._unused}
        return OfStages(
            groups.over(*TOKENS),
            {stage.index: [p for p in stage.module.parameters() if p.requires_grad] for stage in self.stages},
            needed,
            {p for p, name in needed.items() if len(self.trained.placements[name].stages) > 1},
        )

    def placed(self, placements: Mapping[str, Placement]) -> Mapping[str, Placement]:
        stages: dict[str, tuple[int, ...]] = dict.fromkeys(placements, (self.context.pp_rank,))
        for tensor in self._shared:
            places = tuple(dict.fromkeys(self.layout.stage_ranks[stage] for stage in tensor.stages))
            for names in tensor.stages.values():
                stages |= dict.fromkeys((name for name in names if name in placements), places)
        return {name: replace(placement, stages=stages[name]) for name, placement in placements.items()}

    def _has_backward_group(self) -> bool:
        """Return whether gradients of activations have a process group beside that of activations.

        A group of NCCL has one stream for all point-to-point operations, in which one waits for the next.
        """
        return self.context.device.type == "cuda" and sends_one_way(self.layout.schedule)

    def _build(self, builder: StageBuilder, train_set: Dataset[Any], cut: Cut) -> None:
        built = builder.build(cut, own=self._own, stage_ranks=self.layout.stage_ranks)
        self.stages, self._shared = built.stages, built.shared
        for stage in self.stages:
            compile_in_place(stage.module, self.context.train)
        outline = build_fake(builder.constructor, CPU).model
        self.trained = self.trained_of_stages(outline, [stage.module for stage in self.stages], train_set)
        self._cut = cut

    def trained_of_stages(self, outline: nn.Module, modules: Sequence[nn.Module], train_set: Dataset[Any]) -> Trained:
        """Return what this rank trains of its stages; ``outline``: the model that is cut, without memory."""
        if self.divides_optimizer:
            # Divided as in the outline, so that stages that share a tensor have the same part of it on each rank.
            shards = self.shards_of(cuts_of(outline, self.context.mesh.num_shards))
            return self.trained_part(modules, shards, train_set)
        own = {name for name, _ in self.undivided().named_parameters(remove_duplicate=False)}
        every = dict(outline.named_parameters(remove_duplicate=False))
        trained = {every[name] for name in own}  # which another stage may save under another name
        placements = {n: self.placement(n, tuple(p.shape)) for n, p in every.items() if p in trained}
        return self.trained_part(modules, Own(self.undivided, placements), train_set)

    def undivided(self) -> nn.Module:
        """Return a bare module with the tensors of the stages, assembled anew: a layer may replace its buffers."""
        return state_of(self.stages)

    @property
    def saved_names(self) -> Sequence[str]:
        return self._names

    def recoverable_steps(self, step: int) -> RecoverableSteps:
        return {} if self._cut is None else super().recoverable_steps(step)

    def close(self) -> None:
        """Release everything that refers to the process group."""
        if isinstance(self.reduction, MeshReduction):
            self.passes.close()
        self._host = None
        self.reduction, self._sharing = Reduction(), NOTHING_SHARED
        super().close()

    @property
    def timed_stages(self) -> Sequence[TimedStage]:
        """The stages as the schedule calls them, in ascending order."""
        return self.passes.timed_stages

    @property
    def eval_batch_size(self) -> int:
        return self._rows * self.layout.num_microbatches

    @property
    def compared_slices(self) -> tuple[int, int, int]:
        return (2 if self.layout.num_microbatches == 1 else 1), self.eval_batch_size, self.layout.num_microbatches

    def spans(self) -> tuple[Span, ...]:
        return self.passes.spans()

    def stage_summaries(self) -> tuple[StageSummary, ...]:
        assert self._cut is not None
        summaries = []
        for stage in range(self.layout.num_stages):
            own = self._cut.layers_of(stage, len(self._layers))
            share = None if self._costs is None else sum(self._costs[i] for i in own) / sum(self._costs)
            summaries.append(
                StageSummary(
                    layers=tuple(self._layers[i].name for i in own),
                    num_parameters=sum(self._layers[i].num_parameters for i in own),
                    time_share=share,
                )
            )
        return tuple(summaries)

    def _split(self) -> tuple[str, ...] | None:
        """Return the module names of ``strategy.split``, or None to cut by measured time."""
        split = StagedConfig.of(self.context.options).split
        return None if split == "auto" else split

    def _agree_on_cut(self) -> Cut:
        """Return the same cut on every rank. Collective, unless the configuration gives the cut.

        Ranks that have built their stages keep their cut, and new ranks adopt it; otherwise rank 0 measures.
        """
        num_stages, split = self.layout.num_stages, self._split()
        if split is not None:
            cut, errors = cut_at(self._layers, split, num_stages)
            if cut is None:
                raise ValueError("\n".join(errors))
            return cut
        starts = torch.tensor([0] * num_stages if self._cut is None else self._cut.starts, device=self.context.device)
        dist.all_reduce(starts, op=dist.ReduceOp.MAX)
        if starts.any():
            return Cut(tuple(starts.tolist()))
        if self.context.global_rank == 0 and self._builder is not None:
            self._costs = [cost.total_ms for cost in self._builder.measure_costs()]
            starts.copy_(torch.tensor(balance(self._layers, self._costs, num_stages).starts))
        dist.broadcast(starts, src=0)
        return Cut(tuple(starts.tolist()))

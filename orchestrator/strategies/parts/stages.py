"""The stages of a model that is cut, on the ranks of a pipeline.

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

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from orchestrator.compat.pipelining import sends_one_way
from orchestrator.job import Job
from orchestrator.model.batch import to_device
from orchestrator.model.partial_init import build_fake
from orchestrator.model.precision import Precision
from orchestrator.model.stages.cut import Cut, balance, cut_at
from orchestrator.model.stages.own_stages import Shared, Stage, state_of
from orchestrator.planning.mesh import DENSE, TOKENS, even_shares
from orchestrator.planning.placement import Placement
from orchestrator.protocol.events import StageSummary
from orchestrator.state.transport import CPU
from orchestrator.strategies.constructor import constructor_of
from orchestrator.strategies.data.datasets import example_batch
from orchestrator.strategies.groups import NOTHING_SHARED, MeshGroups, Sharing, divided
from orchestrator.strategies.keys import MeshConfig
from orchestrator.strategies.owner import Own, Shards
from orchestrator.strategies.parts.chain import Chain
from orchestrator.strategies.parts.part import ModelPart
from orchestrator.strategies.parts.stage_builder import StageBuilder, recorded_call
from orchestrator.strategies.parts.timed_stage import TimedStage
from orchestrator.strategies.rank_context import Context
from orchestrator.strategies.sums.of_stages import OfStages
from orchestrator.strategies.sums.sums import Sums
from orchestrator.strategies.trained import Trained
from orchestrator.strategies.transforms.blocks import compile_in_place
from orchestrator.strategies.transforms.part import Parts
from orchestrator.strategies.update.job_optimizer import optimizer_of_part
from orchestrator.timeline import Span


class Stages(ModelPart):
    """The stages of one rank."""

    passes: Chain
    is_built_alone = False
    remedy = (  # for what a recording of the code between the layers misses
        "If code of forward() between the layers uses an autograd function, a reentrant checkpoint or autocast, or "
        "keeps tensors for its next call, put it into an nn.Module; otherwise cut elsewhere with strategy.split, "
        "define Job.stages, or make job.model() an nn.Sequential"
    )

    def __init__(self, context: Context, job: Job, precision: Precision):
        super().__init__(context, job, precision)
        self._builder: StageBuilder | None = None  # from setup() until the stages are built
        self._cut: Cut | None = None  # None until the stages are built
        self.stages: Sequence[Stage] = ()
        self._shared: Sequence[Shared] = ()
        self._costs: Sequence[float] | None = None
        self._split = MeshConfig.of(context.options).split
        self._host: dist.ProcessGroup | None = None

    def reassign(self, context: Context) -> None:
        assert context.pipeline is not None
        self.layout, self._rank = context.pipeline, context.pp_rank
        train = context.train
        share = even_shares(train.global_batch_size, context.mesh.data_parallel_size)[context.dp_rank]
        self._rows = share // train.grad_accumulation // self.layout.num_microbatches
        self._own = self.layout.stages_of(context.pp_rank)

    def setup(self, context: Context, parts: Parts, train_set: Dataset[Any]) -> None:
        """Outline the model. :meth:`complete` builds the stages, once the ranks have agreed on the cut."""
        super().setup(context, parts, train_set)
        inputs, target = to_device(example_batch(self.job, train_set, self._rows), context.device)
        self._builder = StageBuilder.outline(
            self.job_of_part,
            parts.begin(self.job, inputs),
            target,
            constructor=parts.of(constructor_of(self.job, context.train, self.precision)),
            split=() if self._split == "auto" else self._split,
            num_stages=self.layout.num_stages,
            device=context.device,
            seed=context.seed,
            precision=self.precision,
            call=recorded_call(self.job),
        )
        sequence = self._builder.sequence
        self._layers, self._names, self._unused = sequence.layers, sequence.saved_names, sequence.unused
        self._outline = sequence.whole.model

    def meet(self, context: Context, groups: MeshGroups) -> None:
        """Form the groups of the pipelines, and agree on the cut.

        Ranks that have built their stages keep their cut, and new ranks adopt it; otherwise rank 0 measures.
        """
        pipeline = groups.over("pipeline")
        backward = divided(context, context.mesh.groups("pipeline")) if self._has_backward_group(context) else pipeline
        assert pipeline is not None
        assert backward is not None
        self._groups: Sequence[dist.ProcessGroup] = (pipeline, backward)
        num_stages = self.layout.num_stages
        if self._split != "auto":
            cut, errors = cut_at(self._layers, self._split, num_stages)
            if cut is None:
                raise ValueError("\n".join(errors))
            self._agreed = cut
            return
        starts = torch.tensor([0] * num_stages if self._cut is None else self._cut.starts, device=context.device)
        dist.all_reduce(starts, op=dist.ReduceOp.MAX)
        if not starts.any():
            if context.global_rank == 0 and self._builder is not None:
                self._costs = self._builder.measure_costs()
                starts.copy_(torch.tensor(balance(self._layers, self._costs, num_stages).starts))
            dist.broadcast(starts, src=0)
        self._agreed = Cut(tuple(starts.tolist()))

    def _has_backward_group(self, context: Context) -> bool:
        """Return whether gradients of activations have a process group beside that of activations.

        A group of NCCL has one stream for all point-to-point operations, in which one waits for the next.
        """
        return context.device.type == "cuda" and sends_one_way(self.layout.schedule)

    def complete(self, context: Context, train_set: Dataset[Any]) -> None:
        assert self._builder is not None
        self._build(self._builder, context, train_set)
        self._builder, self._cut = None, self._agreed

    def _build(self, builder: StageBuilder, context: Context, train_set: Dataset[Any]) -> None:
        built = builder.build(self._agreed, own=self._own, stage_ranks=self.layout.stage_ranks)
        self.stages, self._shared = built.stages, built.shared
        for stage in self.stages:
            compile_in_place(stage.module, context.train)
        self._outline = build_fake(builder.constructor, CPU).model

    @property
    def shares_tensors(self) -> bool:  # type: ignore[override]
        return bool(self._shared)

    @property
    def num_microbatches(self) -> int:  # type: ignore[override]
        return self.layout.num_microbatches

    def module(self) -> nn.Module:
        """Return a bare module with the tensors of the stages, assembled anew: a layer may replace its buffers."""
        return state_of(self.stages)

    @property
    def modules(self) -> Sequence[nn.Module]:
        return [stage.module for stage in self.stages]

    @property
    def outline(self) -> nn.Module:
        return self._outline

    @property
    def saved_names(self) -> Sequence[str]:
        return self._names

    def optimizer(self, owner: Own) -> Optimizer:
        return optimizer_of_part(self.job, self.whole_model(), owner.module())

    def placements(self) -> Mapping[str, Placement]:
        own = {name for name, _ in self.module().named_parameters(remove_duplicate=False)}
        every = dict(self.outline.named_parameters(remove_duplicate=False))
        trained = {every[name] for name in own}  # which another stage may save under another name
        return {n: self.parts.placement(n, tuple(p.shape)) for n, p in every.items() if p in trained}

    def on_stages(self, placements: Mapping[str, Placement]) -> Mapping[str, Placement]:
        stages: dict[str, tuple[int, ...]] = dict.fromkeys(placements, (self._rank,))
        for tensor in self._shared:
            places = tuple(dict.fromkeys(self.layout.stage_ranks[stage] for stage in tensor.stages))
            for names in tensor.stages.values():
                stages |= dict.fromkeys((name for name in names if name in placements), places)
        return {name: replace(placement, stages=stages[name]) for name, placement in placements.items()}

    def divide(self, context: Context, groups: MeshGroups, trained: Trained) -> None:
        self.sharing = Sharing.of(
            self._shared,
            trained.module().state_dict(keep_vars=True),
            context=context,
            stage_ranks=self.layout.stage_ranks,
        )
        on_cpu = context.device.type == "cpu"
        self._host = None if on_cpu else divided(context, context.mesh.replicas, backend="gloo")

    def sums(self, context: Context, groups: MeshGroups, owner: Own) -> Sums:
        owner.group = groups.over(*DENSE) if isinstance(owner, Shards) else None
        needed = {p: n for n, p in self.module().named_parameters() if p.requires_grad and n not in self._unused}
        return OfStages(
            groups.over(*TOKENS),
            {stage.index: [p for p in stage.module.parameters() if p.requires_grad] for stage in self.stages},
            needed,
            {p for p, name in needed.items() if len(owner.placements[name].stages) > 1},
        )

    def connect(self, context: Context, groups: MeshGroups, sums: Sums) -> None:
        pipeline, backward = self._groups
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

    def begin_step(self, *, logged: bool) -> None:
        """Record when the stages compute, and what they wait for, if the step is logged."""
        self.passes.clock.restart(records=logged)

    @property
    def host_group(self) -> dist.ProcessGroup | None:
        return self._host

    def close(self) -> None:
        if hasattr(self, "passes"):
            self.passes.close()
            del self.passes
        self._groups = ()
        self._host, self.sharing = None, NOTHING_SHARED

    @property
    def timed_stages(self) -> Sequence[TimedStage]:
        """The stages as the schedule calls them, in ascending order."""
        return self.passes.timed_stages

    def eval_batch_size(self, of_slice: int) -> int:
        return self._rows * self.num_microbatches

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

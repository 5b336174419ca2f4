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
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

from orchestrator.compat.pipelining import sends_one_way
from orchestrator.config.schema import Config, StrategyConfig
from orchestrator.job import Job
from orchestrator.model.batch import to_device
from orchestrator.model.cut import Cut, balance, cut_at
from orchestrator.model.partial_init import build_fake
from orchestrator.model.stages import Shared, Stage, state_of
from orchestrator.planning.layout import Layout
from orchestrator.planning.mesh import Dimension, even_shares
from orchestrator.planning.plan import Plan
from orchestrator.planning.schedules import SCHEDULES
from orchestrator.protocol.events import StageSummary
from orchestrator.protocol.messages import RecoverableSteps
from orchestrator.state.merge import without_copies, without_shared
from orchestrator.state.train_state import TrainState
from orchestrator.state.transport import CPU, broadcast_state
from orchestrator.strategies.base import Context
from orchestrator.strategies.constructor import Outline, compile_in_place, constructor_of
from orchestrator.strategies.data.datasets import example_batch
from orchestrator.strategies.groups import divided, own_group
from orchestrator.strategies.measure.device_clock import WaitTimer
from orchestrator.strategies.part_trainer import PartTrainer
from orchestrator.strategies.pipelined.chain import Chain
from orchestrator.strategies.pipelined.comparisons import compare_with_whole
from orchestrator.strategies.pipelined.layout import PipelinedConfig, StagedConfig, one_pipeline
from orchestrator.strategies.pipelined.preflight import check_stages
from orchestrator.strategies.pipelined.replica_sums import ReplicaSums, StageSums
from orchestrator.strategies.pipelined.shared_tensors import Sharing
from orchestrator.strategies.pipelined.stage_builder import StageBuilder
from orchestrator.strategies.pipelined.stage_gradients import StageGradients
from orchestrator.strategies.pipelined.timed_stage import TimedStage
from orchestrator.strategies.reduction import Reduction
from orchestrator.strategies.registry import register
from orchestrator.strategies.trained import Trained
from orchestrator.strategies.update.diverging import diverging_errors
from orchestrator.strategies.update.job_optimizer import optimizer_of_part
from orchestrator.timeline.spans import Span


@dataclass(frozen=True, kw_only=True)
class PipelineConfig(PipelinedConfig):
    """The keys of ``pipeline``."""

    name: Literal["pipeline"]


@register("pipeline")
class Pipeline(PartTrainer):
    """The stages of one rank."""

    config_class: ClassVar[type[StrategyConfig]] = PipelineConfig
    passes: Chain
    cuts_batches = True
    divides_model = True
    moves_parameters = True
    size_key: ClassVar[str] = "strategy.num_workers"
    """The key that says how many workers a pipeline has."""

    peers: ClassVar[Dimension] = "replicate"
    """The dimension of the mesh along which ranks compute the same stages, of other samples."""

    @classmethod
    def plan_layout(cls, config: Config, num_workers: int, errors: list[str]) -> Layout:
        return one_pipeline(config, num_workers, errors)

    @classmethod
    def check_job(cls, config: Config, outline: Outline, plan: Plan, errors: list[str]) -> tuple[str, ...]:
        assert plan.pipeline is not None
        schedule = SCHEDULES[plan.pipeline.schedule]
        if config.train.activation_checkpointing == "selective" and schedule.splits_backward:
            errors.append(
                f"train.activation_checkpointing=selective: {schedule.name} computes backward passes in halves, and "
                "what is kept serves only one; set it to blocks, or use strategy.schedule=1F1B"
            )
        errors += diverging_errors(outline.model, plan)
        return check_stages(config, outline, plan, errors, size_key=cls.size_key)

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
        self._gradients: StageGradients | None = None  # None between two generations

    def reassign(self, context: Context) -> None:
        super().reassign(context)
        assert context.pipeline is not None
        self.layout = context.pipeline
        train = context.train
        share = even_shares(train.global_batch_size, context.mesh.data_parallel_size)[context.dp_rank]
        self._rows = share // train.grad_accumulation // self.layout.num_microbatches
        self._own = self.layout.stages_of(context.pp_rank)
        self.reads_data = 0 in self._own or self.layout.num_stages - 1 in self._own

    def setup(self, train_set: Dataset[Any]) -> None:
        """Outline the model. :meth:`attach` builds the stages, once the ranks have agreed on the cut."""
        context, self._train_set = self.context, train_set
        inputs, target = to_device(example_batch(self.job, train_set, self._rows), context.device)
        self._builder = StageBuilder.outline(
            self.job,
            inputs,
            target,
            constructor=constructor_of(self.job, context.train, self.precision),
            split=self._split() or (),
            num_stages=self.layout.num_stages,
            device=context.device,
            seed=context.seed,
            precision=self.precision,
        )
        self._layers = self._builder.sequence.layers
        self._names = self._builder.sequence.saved_names
        self._unused = self._builder.sequence.unused

    def attach(self) -> None:
        context = self.context
        mesh = context.mesh
        pipeline = own_group(context, mesh.groups("pipeline"))
        backward = divided(context, mesh.groups("pipeline")) if self._has_backward_group() else pipeline
        peers = own_group(context, mesh.groups(self.peers))
        assert pipeline is not None
        assert backward is not None
        cut = self._agree_on_cut()
        if self._builder is not None and self._train_set is not None:
            if self.context.global_rank == 0:
                self._warnings = compare_with_whole(
                    self._builder, self._train_set, context=context, precision=self.precision, rows=self._rows
                )
            self._build(self._builder, self._train_set, cut)
            self.check_hooks(
                self.trained.module(), num_microbatches=self.layout.num_microbatches, shared=bool(self._shared)
            )
            self._builder = self._train_set = None
        super().attach()
        sharing = Sharing(
            self._shared,
            self.trained.module().state_dict(keep_vars=True),
            context=context,
            stage_ranks=self.layout.stage_ranks,
        )
        on_cpu = context.device.type == "cpu"
        self._host = None if on_cpu else divided(context, mesh.replicas, backend="gloo")
        sums = self._sums(peers)
        self._gradients = self.reduction = StageGradients(
            context=context,
            trained=self.trained,
            peers=peers,
            whole=self._whole_parameters(),
            sums=sums,
            sharing=sharing,
            waits=WaitTimer(context.device),
            settles=mesh.replicate > 1,
        )
        self.passes = Chain(
            self.stages,
            self.layout,
            job=self.job,
            rows=self._rows,
            device=context.device,
            group=pipeline,
            precision=self.precision,
            sums=sums,
            backward_group=backward,
        )

    @contextlib.contextmanager
    def around_step(self, *, logged: bool) -> Iterator[None]:
        """Record when the stages compute, and what they wait for, if the step is logged."""
        self._connected.waits.restart(counts=logged)
        self.passes.clock.restart(records=logged)
        with super().around_step(logged=logged):
            yield

    def _sums(self, peers: dist.ProcessGroup | None) -> StageSums:
        """Return the sums over the ranks that compute the same stages."""
        named = self.trained.module().named_parameters()
        return ReplicaSums(
            peers,
            {stage.index: [p for p in stage.module.parameters() if p.requires_grad] for stage in self.stages},
            {p: n for n, p in named if p.requires_grad and n not in self._unused},
        )

    def _whole_parameters(self) -> Collection[nn.Parameter]:
        """Return the parameters that are whole on this rank."""
        return list(self.trained.module().parameters())

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
        optimizer = optimizer_of_part(self.job, build_fake(builder.constructor, CPU).model, state_of(self.stages))
        stages, modules = self.stages, [stage.module for stage in self.stages]
        # The bare module is assembled at each call, because a layer may replace its buffers.
        self.trained = Trained(
            self.job, self.context, modules, {"": optimizer}, train_set, module=lambda: state_of(stages)
        )
        self._cut = cut

    def sync_initial_state(self) -> None:
        self._connected.sync_initial_state()

    @property
    def saved_names(self) -> Sequence[str]:
        return self._names

    def own_share(self, state: TrainState) -> TrainState:
        sharing = self._connected.sharing
        state = without_shared(state, sharing.first_names, saved=sharing.saved_elsewhere)
        return state if self._is_first_shard else without_copies(state)

    def is_first_with(self, name: str) -> bool:
        return self._saves(name, elsewhere=self._connected.sharing.first_names)

    def frozen(self) -> Mapping[str, int]:
        elsewhere = self._connected.sharing.saved_elsewhere
        return self.trained.frozen(lambda name: self._saves(name, elsewhere=elsewhere))

    def _saves(self, name: str, *, elsewhere: Collection[str]) -> bool:
        """Return whether this rank saves its part of a parameter, unless the name is one of ``elsewhere``."""
        is_writer = self.context.global_rank in self.writers and name not in elsewhere
        return is_writer and (self._is_first_shard or name in self.trained.boxes)

    def restore_part(self, state: TrainState) -> dict[str, Any]:
        self.load(state, partial=True)
        return state.meta

    def restore(self, state: TrainState | None, *, source: int) -> dict[str, Any]:
        context = self.context
        wanted = {*self.trained.module().state_dict(), *self._connected.sharing.first_names.values()}
        state = broadcast_state(
            state,
            source=source,
            rank=context.global_rank,
            device=context.device,
            keep=wanted.__contains__,
            boxes=self.trained.boxes,
        )
        return self.restore_part(state)

    def recoverable_steps(self, step: int) -> RecoverableSteps:
        return {} if self._cut is None else super().recoverable_steps(step)

    def close(self) -> None:
        """Release everything that refers to the process group."""
        if self._gradients is not None:
            self.passes.close()
            self._host = self._gradients = None
            self.reduction = Reduction()
        super().close()

    @property
    def timed_stages(self) -> Sequence[TimedStage]:
        """The stages as the schedule calls them, in ascending order."""
        return self.passes.timed_stages

    @property
    def eval_batch_size(self) -> int:
        return self._rows * self.layout.num_microbatches

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

    def comm_ms(self) -> float | None:
        return self._connected.waited_ms()

    @property
    def _is_first_shard(self) -> bool:
        """Whether this is the one of the ranks with parts of a stage that saves what all of them have whole."""
        return self.context.mesh.coords(self.context.global_rank).shard == 0

    @property
    def _connected(self) -> StageGradients:
        assert self._gradients is not None, "attach() has not been called"
        return self._gradients

    def _split(self) -> tuple[str, ...] | None:
        """Return the module names of ``strategy.split``, or None to cut by measured time."""
        options = self.context.options
        assert isinstance(options, StagedConfig)
        return None if options.split == "auto" else options.split

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

"""``model_parallel``, ``pipeline`` and ``ddp_pipeline``: the model cut into stages, a chain of workers a replica.

Each worker builds only its own stages. Micro-batches flow through the chain (``chain.py``); one micro-batch is the
naive split. The loss of a micro-batch is weighted by its part of the global weight, so that the gradients that add up,
over micro-batches, slices and replicas, are those of ``single``. Gradients are brought together after the last backward
pass, in one way for every schedule: the zero-bubble ones go around DDP's hooks.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset, default_collate

from orchestrator.config.schema import Config, StrategyConfig
from orchestrator.job import Job
from orchestrator.model.batch import to_device
from orchestrator.model.cut import Cut, balance, cut_at
from orchestrator.model.layers import changing_buffers, costs, flow
from orchestrator.model.stages import (
    Shared,
    build_stages,
    sequence_of,
    shared_buffers,
    shared_parameters,
    state_of,
)
from orchestrator.planning.layout import Layout
from orchestrator.planning.mesh import even_shares
from orchestrator.planning.plan import Plan
from orchestrator.protocol.events import StageSummary
from orchestrator.state import train_state
from orchestrator.state.merge import merge, without_shared
from orchestrator.state.train_state import TrainState
from orchestrator.state.transport import broadcast_state, gather_states, receive_state, send_state
from orchestrator.strategies.base import Context, EvalSums
from orchestrator.strategies.gradients import norm_over, sum_over
from orchestrator.strategies.optimizer_step import OptimizerStep
from orchestrator.strategies.peer_copies import PeerCopies
from orchestrator.strategies.pipelined.chain import Chain
from orchestrator.strategies.pipelined.layout import PipelinedConfig, StagedConfig, one_pipeline
from orchestrator.strategies.pipelined.preflight import check_stages
from orchestrator.strategies.pipelined.shared_tensors import Sharing
from orchestrator.strategies.pipelined.timed_stage import TimedStage
from orchestrator.strategies.registry import register
from orchestrator.strategies.replicated.whole_model import entries
from orchestrator.timeline.spans import Span


@dataclass(frozen=True, kw_only=True)
class PipelineConfig(PipelinedConfig):
    name: Literal["pipeline"]


@register("pipeline")
class Pipeline(OptimizerStep):
    config_class: ClassVar[type[StrategyConfig]] = PipelineConfig
    size_key: ClassVar[str] = "strategy.num_workers"
    """The key that says how many workers a pipeline has."""

    @classmethod
    def plan_layout(cls, config: Config, num_workers: int, errors: list[str]) -> Layout:
        return one_pipeline(config, num_workers, errors)

    @classmethod
    def check_job(cls, config: Config, job: Job, plan: Plan, errors: list[str]) -> tuple[str, ...]:
        return check_stages(config, job, plan, errors, size_key=cls.size_key)

    def __init__(self, context: Context, job: Job):
        super().__init__(context, job)
        self.reassign(context)
        self._comm_ms: float | None = None
        self._built = False
        self._copies: PeerCopies | None = None
        if context.peer_copy_every:
            self._copies = PeerCopies()

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
        """Look at the model; its stages are built once the ranks have agreed on the cut, in :meth:`attach`."""
        context = self.context
        collate = self.job.collate or default_collate
        inputs, target = to_device(collate([train_set[0]] * self._rows), context.device)
        split = self._split()
        sequence = sequence_of(self.job.model, inputs, context.device, split=split or ())
        self._layers = sequence.layers
        self._names = list(sequence.whole.model.state_dict())
        values = flow(sequence, inputs, precision=self._precision)
        self._costs: Sequence[float] | None = None

        def measure() -> Sequence[float]:
            fresh = sequence_of(self.job.model, inputs, context.device, split=())
            return costs(fresh, values, inputs, precision=self._precision, loss=lambda o: self.job.loss(o, target))

        def build(cut: Cut) -> None:
            buffers = shared_buffers(sequence, cut)
            if buffers:
                changing = changing_buffers(sequence, inputs, precision=self._precision)
                self._refuse_changing(buffers, changing)
            self._shared = [*shared_parameters(sequence, cut), *buffers]
            self.stages = build_stages(
                self.job.model, sequence, values, cut, self._own, device=context.device, seed=context.seed
            )

        self._measure, self._build = measure, build

    def attach(self) -> None:
        context = self.context
        grid = context.mesh.device_mesh(context.device.type)
        self._pipeline, self._replicas = grid.get_group("pp"), grid.get_group("dp")
        self.cut = self._agreed_cut()
        if not self._built:
            self._build(self.cut)
            self.parameters = [p for p in self.model.parameters() if p.requires_grad]
            self.optimizer = _optimizer_of(self.job, self.parameters)
            self.scheduler = self.job.scheduler(self.optimizer, context.train.steps)
            self._built = True
        super().attach()
        if self._copies is not None:
            self._copies.attach(
                self._group_for_copies(), context.mesh.pipeline(context.dp_rank), rank=context.global_rank
            )
        self._sharing = Sharing(
            self._shared,
            self.model.state_dict(keep_vars=True),
            mesh=context.mesh,
            global_rank=context.global_rank,
            stage_ranks=self.layout.stage_ranks,
        )
        self._chain = Chain(
            self.stages,
            self.layout,
            job=self.job,
            rows=self._rows,
            device=context.device,
            group=self._pipeline,
            precision=self._precision,
        )

    @torch.no_grad()
    def sync_initial_state(self) -> None:
        if self.context.mesh.data_parallel_size > 1:
            for tensor in (*self.model.parameters(), *self._buffers()):
                dist.broadcast(tensor, group=self._replicas, group_src=0)
        self._sharing.sync_initial_state()

    @property
    def model(self) -> nn.Module:  # type: ignore[override]
        """The tensors of this worker's stages under the model's own names, as they are now."""
        return state_of(self.stages)

    def evaluate(self, batch: Any, valid: int) -> EvalSums:
        return self._chain.evaluate(to_device(batch, self.context.device), valid)

    def capture(self, *, step: int, samples_consumed: int, into: TrainState | None) -> TrainState | None:
        context = self.context
        if context.dp_rank != 0:
            return None
        state = self.snapshot(step=step, samples_consumed=samples_consumed, into=into)
        states = gather_states(
            without_shared(state, self._sharing.first_names, saved=self._sharing.saved_elsewhere),
            ranks=context.mesh.pipeline(0),
            rank=context.global_rank,
            device=context.device,
            into=into,
        )
        return None if states is None else merge(states, order=self._names)

    def restore(self, state: TrainState | None, *, source: int) -> dict[str, Any]:
        context = self.context
        wanted = {*self.model.state_dict(), *self._sharing.first_names.values()}
        state = broadcast_state(
            state, source=source, rank=context.global_rank, device=context.device, keep=wanted.__contains__
        )
        train_state.restore(state, self.model, self.optimizer, self.scheduler, partial=True)
        return state.meta

    def after_step(self, *, step: int, samples_consumed: int) -> None:
        copies, every = self._copies, self.context.peer_copy_every
        if copies is not None and step % every == 0:
            copies.submit(lambda into: self.snapshot(step=step, samples_consumed=samples_consumed, into=into))

    def recoverable_steps(self, step: int, *, update_complete: bool) -> Mapping[int, tuple[int, ...]]:
        """The stages of this worker, which its replicas have too, and copies of these and of a neighbour's."""
        mesh, pp_rank = self.context.mesh, self.context.pp_rank
        of_stage: dict[int, tuple[int, ...]] = {}
        if self._built and update_complete:
            of_stage[pp_rank] = (step,)
        if self._copies is not None:
            of_stage[pp_rank] = (*of_stage.get(pp_rank, ()), *self._copies.own_steps)
            of_stage[(pp_rank - 1) % mesh.pipeline_parallel_size] = self._copies.neighbours_steps
        return {rank: steps for stage, steps in of_stage.items() for rank in mesh.replicas(stage)}

    def recover_state(
        self, sources: Sequence[int], *, source_step: int, step: int, samples_consumed: int
    ) -> dict[str, Any]:
        """From replica to replica of a stage, from the neighbour that keeps a copy, or from one's own copy."""
        own, device = self.context.global_rank, self.context.device
        here: dict[str, int] = {"step": step, "samples_consumed": samples_consumed}
        meta: dict[str, Any] = here
        for receiver, sender in enumerate(sources):
            if own == sender != receiver:
                send_state(self._state_of(receiver, source_step, **here), to=receiver, device=device)
            elif own == receiver != sender:
                meta = self._take_over(receive_state(sender, device=device))
        if sources[own] == own and step != source_step:
            assert self._copies is not None
            meta = self._take_over(self._copies.own(source_step))
        if self._copies is not None:
            self._copies.forget_after(source_step)
        assert meta["step"] == source_step
        return meta

    def _state_of(self, rank: int, wanted: int, *, step: int, samples_consumed: int) -> TrainState:
        """The state of a rank after the step ``wanted``, as this one holds it."""
        if self.context.mesh.pp_rank(rank) == self.context.pp_rank and wanted == step:
            return self.snapshot(step=step, samples_consumed=samples_consumed)
        assert self._copies is not None
        if self.context.mesh.pp_rank(rank) == self.context.pp_rank:
            return self._copies.own(wanted)
        return self._copies.neighbours(wanted)

    def _take_over(self, state: TrainState) -> dict[str, Any]:
        train_state.restore(state, self.model, self.optimizer, self.scheduler)
        return {name: state.meta[name] for name in ("step", "samples_consumed")}

    def _group_for_copies(self) -> dist.ProcessGroup:
        """That of this worker's pipeline; every rank takes part in forming those of all."""
        mesh = self.context.mesh
        groups: list[dist.ProcessGroup] = [
            dist.new_group(mesh.pipeline(d), backend="gloo") for d in range(mesh.data_parallel_size)
        ]
        return groups[self.context.dp_rank]

    def close(self) -> None:
        """Give up all that holds a process group."""
        if "_chain" in vars(self):
            self._chain.close()
        if self._copies is not None:
            self._copies.detach()
        for owner in ("_chain", "_pipeline", "_replicas", "_sharing"):
            vars(self).pop(owner, None)

    @property
    def timed_stages(self) -> list[TimedStage]:
        return self._chain.timed_stages

    @property
    def eval_batch_size(self) -> int:
        return self._rows * self.layout.num_microbatches

    def spans(self) -> tuple[Span, ...]:
        return self._chain.spans()

    def stage_summaries(self) -> tuple[StageSummary, ...]:
        summaries = []
        for stage in range(self.layout.num_stages):
            own = self.cut.layers_of(stage, len(self._layers))
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
        return self._comm_ms

    def _split(self) -> tuple[str, ...] | None:
        """The names that the configuration gives; None: cut by measured time."""
        options = self.context.options
        assert isinstance(options, StagedConfig)
        return None if options.split == "auto" else options.split

    def _agreed_cut(self) -> Cut:
        """The cut of the configuration, or the balanced one: that of the ranks that have one, or as rank 0 measures."""
        num_stages, split = self.layout.num_stages, self._split()
        if split is not None:
            cut, errors = cut_at(self._layers, split, num_stages)
            if cut is None:
                raise ValueError("\n".join(errors))
            return cut
        starts = torch.tensor(self.cut.starts if self._built else [0] * num_stages, device=self.context.device)
        dist.all_reduce(starts, op=dist.ReduceOp.MAX)
        if starts.any():
            return Cut(tuple(starts.tolist()))
        if self.context.global_rank == 0:
            self._costs = self._measure()
            starts.copy_(torch.tensor(balance(self._layers, self._costs, num_stages).starts))
        dist.broadcast(starts, src=0)
        return Cut(tuple(starts.tolist()))

    def _refuse_changing(self, buffers: Sequence[Shared], changing: set[str]) -> None:
        for buffer in buffers:
            names = [name for of_stage in buffer.stages.values() for name in of_stage]
            apart = len({self.layout.stage_ranks[stage] for stage in buffer.stages}) > 1
            if apart and not changing.isdisjoint(names):
                raise ValueError(
                    f"{names[0]}: forward passes change it, and stages of several workers would have it, whose copies "
                    "then differ; use its layer once, or cut with strategy.split so that one worker has it"
                )

    def _buffers(self) -> list[Tensor]:
        """Those of this worker's stages as they are now, also those that are not saved."""
        return list(nn.ModuleList(stage.module for stage in self.stages).buffers())

    def _weigh(self, slices: Sequence[Any]) -> tuple[Sequence[float | Tensor], float | Tensor]:
        """The weight of every micro-batch and that of the global batch, where the loss is."""
        if not self._chain.has_loss:
            return [], 1.0
        weights = [self.job.weight(t) for _, target in slices for t in self._chain.microbatches(target)]
        if weights[0] is None:
            return [self._rows] * len(weights), self.context.train.global_batch_size
        counted = [w for w in weights if w is not None]
        total = torch.as_tensor(sum(counted), dtype=torch.float32, device=self.context.device).clone()
        dist.all_reduce(total, group=self._replicas)
        return counted, total

    def _backward(
        self, slices: Sequence[Any], weights: Sequence[float | Tensor], total_weight: float | Tensor
    ) -> Tensor:
        loss_sum = self._chain.train(slices, weights, total_weight)
        self._bring_gradients_together()
        return loss_sum

    def _gradient_norm(self) -> Tensor:
        elsewhere = self._sharing.counted_elsewhere
        counted = [entries(p.grad) for p in self.parameters if p.grad is not None and p not in elsewhere]
        return norm_over(self._pipeline, counted, self.context.device)

    def _bring_gradients_together(self) -> None:
        """Every parameter's over the replicas of its stage, then those that several stages have over these."""
        began = time.perf_counter()
        if self.context.mesh.data_parallel_size > 1:
            unused = [n for n, p in self.model.named_parameters() if p.requires_grad and p.grad is None]
            if unused:
                raise ValueError(
                    f"parameters that take no part in the loss: {', '.join(unused)}; the other replicas would wait "
                    "for their gradients. Use them or freeze them (requires_grad=False)"
                )
            sum_over(self._replicas, [p.grad for p in self.parameters if p.grad is not None])
            for buffer in self._buffers():
                dist.broadcast(buffer, group=self._replicas, group_src=0)
        self._sharing.add_gradients()
        if self.context.mesh.data_parallel_size > 1:
            self._comm_ms = (time.perf_counter() - began) * 1e3


def _optimizer_of(job: Job, parameters: Sequence[nn.Parameter]) -> Optimizer:
    """The job's, with the same groups where there is nothing to train: a frozen stage has a learning rate too."""
    if parameters:
        return job.optimizer(parameters)
    optimizer = job.optimizer([nn.Parameter(torch.empty(0))])  # torch makes none of nothing
    for group in optimizer.param_groups:
        group["params"] = []
    return optimizer

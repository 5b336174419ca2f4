"""What ``pipeline`` and ``parameter_server`` themselves cost, with models that compute little, and communication."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset, default_collate

from orchestrator.compat.pipelining import computations
from orchestrator.job import Job, Split
from orchestrator.planning.mesh import Mesh
from orchestrator.planning.schedules import SCHEDULES, PipelineLayout
from orchestrator.strategies.asynchronous.parameter_server.strategy import ParameterServer
from orchestrator.strategies.base import Strategy
from orchestrator.strategies.groups import new_group
from orchestrator.strategies.keys import ParameterServerConfig, mesh_config
from orchestrator.strategies.measure.device import mean_over, medians_ms
from orchestrator.strategies.mesh_trainer import MeshTrainer
from orchestrator.strategies.rank_context import Context
from orchestrator.strategies.trainer import Trainer
from orchestrator.strategies.tuned.passes import STEPS
from orchestrator.timeline import extent_s, simulate
from orchestrator.tuning.profile import MIB, NO_COST, Affine, GroupCost, fit

RUNS = 20
ROWS = 4
"""The samples of a worker in a step."""
WIDTH = 4
SERVED_WIDTHS = (WIDTH, 512, 2048)
"""The widths of layers that a server serves: up to 16 MiB."""
LEAST_MS = 0.01
"""The shortest time that is believed."""

_Schedule = Literal["1F1B", "Interleaved1F1B"]
SIZES_MIB = (1 / 256, 1 / 4, 4, 16)
COLLECTIVE_RUNS = 8


@dataclass(frozen=True, kw_only=True)
class _TinyJob(Job):
    """A chain of linear layers."""

    layers: int
    width: int = WIDTH

    def model(self) -> nn.Module:
        width = self.width
        return nn.Sequential(OrderedDict((f"layer{i}", nn.Linear(width, width)) for i in range(self.layers)))

    def dataset(self, split: Split) -> Dataset[tuple[Tensor, ...]]:
        return TensorDataset(torch.zeros(1, self.width), torch.zeros(1, self.width))

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(output, target)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)


@dataclass(frozen=True, kw_only=True)
class MachineryCost:
    """The time that the code around the passes takes.

    Attributes:
        base_ms: the cost of a step under any strategy.
        pipeline: what a pipeline adds to a step; the unit of size is a pass of a stage.
        interleaved: the same, with two stages on each worker.
        server: what ``parameter_server`` adds to a step, for each MiB of gradients that a server receives.
    """

    base_ms: float = 0.0
    pipeline: Affine = NO_COST
    interleaved: Affine = NO_COST
    server: Affine = NO_COST


def machinery_cost(
    context: Context, control: dist.ProcessGroup, *, with_pipelines: bool, with_servers: bool
) -> MachineryCost:
    """Measure steps of tiny models on all ranks. Collective.

    Args:
        context: the place of this rank.
        control: a group of all ranks, on the hosts.
        with_pipelines: whether to measure pipelines, too.
        with_servers: whether to measure ``parameter_server``, too.
    """
    n = context.mesh.world_size
    train = dataclasses.replace(
        context.train,
        grad_accumulation=1,
        global_batch_size=ROWS * n,
        steps=STEPS,
        ema_decay=None,
        precision="fp32",
        compile=False,
        activation_checkpointing="none",
    )
    tiny = dataclasses.replace(context, train=train, pipeline=None, peer_copy_every=0)
    alone = dataclasses.replace(tiny, mesh=Mesh(), global_rank=0, options=mesh_config("single"))
    job = _TinyJob(layers=n)
    measured = functools.partial(_step_ms, rank=context.global_rank, ranks=n, control=control)
    return MachineryCost(
        base_ms=measured(Trainer(alone, job), rows=ROWS * n),
        pipeline=_pipeline_cost(tiny, measured, stages_per_rank=1) if with_pipelines else NO_COST,
        interleaved=_pipeline_cost(tiny, measured, stages_per_rank=2) if with_pipelines else NO_COST,
        server=_server_cost(tiny, alone, measured) if with_servers else NO_COST,
    )


def _pipeline_cost(context: Context, measured: Callable[..., float], *, stages_per_rank: int) -> Affine:
    """Measure a pipeline of all ranks with few and with many micro-batches."""
    n = context.mesh.world_size
    schedule: _Schedule = "1F1B" if stages_per_rank == 1 else "Interleaved1F1B"
    job = _TinyJob(layers=n * stages_per_rank)
    points = []
    for microbatches in (n, ROWS * n):
        orders = computations(schedule, n, microbatches, stages_per_rank)
        passes_in_a_row = extent_s(simulate(orders, duration_of=lambda action: 1.0))
        staged = _staged(context, schedule, microbatches, stages_per_rank)
        points.append((passes_in_a_row, measured(MeshTrainer(staged, job), rows=ROWS * n)))
    return fit(points)


def _server_cost(context: Context, alone: Context, measured: Callable[..., float]) -> Affine:
    """Measure a server on the last rank, which serves all others. ``measured``: :func:`_step_ms` of a strategy."""
    workers = context.mesh.world_size - 1
    options = ParameterServerConfig(name="parameter_server", num_workers=workers, num_shards=1, consistency="sync")
    served = dataclasses.replace(context, mesh=Mesh(replicate=workers, num_servers=1), options=options)
    points = []
    for width in SERVED_WIDTHS:
        job = _TinyJob(layers=1, width=width)
        single_ms = measured(Trainer(alone, job), rows=ROWS)
        served_ms = measured(ParameterServer.create(served, job), rows=ROWS)
        received_bytes = workers * sum(p.nbytes for p in job.model().parameters())
        points.append((received_bytes / MIB, max(LEAST_MS, served_ms - single_ms)))
    return fit(points)


def _staged(context: Context, schedule: _Schedule, microbatches: int, stages_per_rank: int) -> Context:
    n, num_stages = context.mesh.world_size, context.mesh.world_size * stages_per_rank
    options = mesh_config(
        "pipeline",
        num_workers=n,
        schedule=schedule,
        num_microbatches=microbatches,
        stages_per_rank=stages_per_rank,
        split=tuple(f"layer{i}" for i in range(1, num_stages)),
    )
    layout = PipelineLayout(
        schedule=schedule,
        num_stages=num_stages,
        num_microbatches=microbatches,
        stage_ranks=SCHEDULES[schedule].stage_ranks(num_stages, n),
    )
    return dataclasses.replace(context, mesh=Mesh(pipeline=n), options=options, pipeline=layout)


def _step_ms(strategy: Strategy, *, rows: int, rank: int, ranks: int, control: dist.ProcessGroup) -> float:
    """Return the time of a step over ``rows`` samples, in milliseconds. Collective."""
    assert isinstance(strategy.job, _TinyJob)
    train_set = strategy.job.dataset("train")
    batch = default_collate([train_set[0]] * rows) if strategy.traits.reads_data else None
    try:
        strategy.setup(train_set)
        strategy.attach()
        strategy.sync_initial_state()
        step = functools.partial(strategy.train_step, [batch], want_grad_norm=False, want_metrics=False)
        (own_ms,) = medians_ms([step], strategy.context.device, runs=RUNS)
        with strategy.quiesced():  # no message is on its way
            return mean_over(ranks, own_ms, control)
    finally:
        strategy.close()


def group_cost(workers: int, context: Context, control: dist.ProcessGroup) -> GroupCost:
    """Measure the first ``workers`` ranks; ``control`` is a group of all ranks on the hosts."""
    group = new_group(context, range(workers))
    takes_part = context.global_rank < workers
    points: list[list[tuple[float, float]]] = [[], [], []]
    for size in SIZES_MIB:
        part = torch.zeros(math.ceil(size * MIB / 4 / workers), device=context.device)
        whole = torch.zeros(len(part) * workers, device=context.device)
        calls = (
            functools.partial(dist.all_reduce, whole, group=group),
            functools.partial(dist.all_gather_into_tensor, whole, part, group=group),
            functools.partial(dist.reduce_scatter_tensor, part, whole, group=group),
        )
        times = medians_ms(calls, context.device, runs=COLLECTIVE_RUNS) if takes_part else (0.0,) * len(calls)
        for found, own_ms in zip(points, times, strict=True):
            found.append((size, mean_over(workers, own_ms, control)))
    all_reduce, all_gather, reduce_scatter = map(fit, points)
    return GroupCost(workers=workers, all_reduce=all_reduce, all_gather=all_gather, reduce_scatter=reduce_scatter)


def message_cost(context: Context, control: dist.ProcessGroup) -> Affine:
    """Measure a message from rank 0 to rank 1 by its way there and back."""
    rank = context.global_rank
    points = []
    for size in SIZES_MIB:
        values = torch.zeros(int(size * MIB / 4), device=context.device)
        call = functools.partial(_echo, values, rank)
        (own_ms,) = medians_ms([call], context.device, runs=COLLECTIVE_RUNS) if rank < 2 else (0.0,)
        points.append((size, mean_over(2, own_ms, control) / 2))
    return fit(points)


def _echo(values: torch.Tensor, rank: int) -> None:
    for sender in (0, 1):
        if rank == sender:
            dist.send(values, dst=1 - sender)
        else:
            dist.recv(values, src=sender)

"""What will run where: a pure function of the configuration and the cluster. No Ray, no torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from orchestrator.config.build import ConfigError
from orchestrator.config.schema import (
    Config,
    DDPPipelineConfig,
    DPConfig,
    HogwildConfig,
    ParameterServerConfig,
    PipelineConfig,
    StagedConfig,
    StrategyConfig,
)
from orchestrator.planning.faults import Fault, planned
from orchestrator.planning.mesh import Mesh, even_shares
from orchestrator.planning.schedules import SCHEDULES, PipelineLayout, Schedule

MOST_NODES_LISTED = 8


@dataclass(frozen=True, kw_only=True)
class Node:
    """A machine of the cluster and all it has, free or not."""

    node_id: str
    name: str
    cpus: float
    gpus: int


@dataclass(frozen=True, kw_only=True)
class WorkerPlan:
    """``stages``: those on this worker; none where the model is not cut. ``shard``: the parameters that this rank holds
    for the workers; None: it is a worker itself."""

    global_rank: int
    dp_rank: int
    pp_rank: int
    samples_per_step: int
    stages: tuple[int, ...] = ()
    shard: int | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything decided before Ray starts an actor.

    ``split``: where stages begin; None: by measured time. ``errors``: those to rehearse.
    """

    run_name: str
    strategy: str
    job: str
    steps: int
    global_batch_size: int
    grad_accumulation: int
    mesh: Mesh
    device: Literal["cpu", "cuda"]
    cpus_per_worker: float
    gpus_per_worker: int
    devices_per_worker: int
    one_node: bool
    threads_per_worker: int
    spares: int
    workers: tuple[WorkerPlan, ...]
    pipeline: PipelineLayout | None = None
    split: tuple[str, ...] | None = None
    faults: tuple[Fault, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        return self.mesh.world_size

    def display_name(self, global_rank: int) -> str:
        """A worker for people: ``rank 1``, ``rank 1 (stage 1)``, ``rank 0 (stages 0 and 3)``, ``rank 2 (shard 0)``."""
        stages, shard = self.workers[global_rank].stages, self.workers[global_rank].shard
        if shard is not None:
            return f"rank {global_rank} (shard {shard})"
        if not stages:
            return f"rank {global_rank}"
        noun = "stage" if len(stages) == 1 else "stages"
        return f"rank {global_rank} ({noun} {' and '.join(str(s) for s in stages)})"


def make_plan(config: Config, nodes: tuple[Node, ...], *, oversubscribe_cpus: bool) -> Plan:
    """Lay the run out over ``nodes``.

    ``oversubscribe_cpus``: CPUs are only shares of this machine (an embedded Ray), never a limit.

    Raises:
        ConfigError: with every fault, each naming the key to change.
    """
    errors: list[str] = []
    notes: list[str] = []
    strategy, train, cluster = config.strategy, config.train, config.cluster
    total_gpus = sum(n.gpus for n in nodes)
    device: Literal["cpu", "cuda"] = "cpu"
    if cluster.device == "cuda" or (cluster.device == "auto" and total_gpus > 0):
        device = "cuda"

    num_workers = strategy.num_workers
    assert not isinstance(num_workers, tuple), "of an elastic run each size has a plan of its own"
    if num_workers == "auto":
        num_workers = total_gpus if device == "cuda" and total_gpus else _workers_on_cpus(strategy)
        if strategy.name == "single":
            num_workers = 1
    mesh = _mesh(strategy, num_workers, errors)
    pipeline = _pipeline(config, mesh, errors)

    devices = num_workers if isinstance(strategy, DPConfig) else 1
    gpus_per_worker = devices if device == "cuda" else 0
    if isinstance(strategy, ParameterServerConfig) and device == "cuda":
        errors.append(
            "strategy=parameter_server: its workers compute on CPUs as yet; set cluster.device=cpu, or use strategy=ddp"
        )
    if isinstance(strategy, HogwildConfig):
        errors += _shared_memory_errors(config, nodes, device, num_workers, oversubscribe_cpus)
    elif device == "cuda" and total_gpus == 0 and not cluster.autoscaling:
        errors.append(f"cluster.device=cuda: no node has a GPU ({_inventory(nodes)}); use cpu or auto")
    elif not cluster.autoscaling:
        errors += _capacity_errors(config, nodes, mesh, devices, gpus_per_worker, oversubscribe_cpus)
    if not isinstance(strategy, StagedConfig):
        errors += _batch_errors(config, num_workers)
    cores = sum(n.cpus for n in nodes)
    processes = num_workers + mesh.num_shards
    threads = int(cores // processes if oversubscribe_cpus else cluster.cpus_per_worker)
    if device == "cpu" and oversubscribe_cpus and processes > cores:
        who = "workers and shards" if mesh.num_shards else "workers"
        notes.append(f"{processes} {who} share {cores:g} cores: expect no speed-up from them")
    rehearsed = _faults_to_rehearse(config, mesh.world_size, errors)
    if errors:
        raise ConfigError(errors)

    samples = even_shares(train.global_batch_size, mesh.data_parallel_size)
    if isinstance(strategy, DDPPipelineConfig):
        notes.append(_placement(strategy))
    if mesh.num_shards:
        notes.append(
            f"placement: gradients on {_ranks(range(mesh.num_workers))}, parameters on {_ranks(mesh.shards)}, "
            "which are spread over the nodes where there are several"
        )
    if isinstance(strategy, DPConfig):
        notes.append("one process feeds all devices and gathers on the first: strategy=ddp is nearly always faster")
    if rehearsed:
        notes.append(f"faults to rehearse: {', '.join(map(str, rehearsed))}")
    if len(set(samples)) > 1:
        notes.append(f"shares of the batch differ ({samples[0]} and {samples[-1]} samples); weighted exactly")
    return Plan(
        run_name=config.run_name,
        strategy=strategy.name,
        job=config.job_name,
        steps=train.steps,
        global_batch_size=train.global_batch_size,
        grad_accumulation=train.grad_accumulation,
        mesh=mesh,
        device=device,
        cpus_per_worker=cluster.cpus_per_worker * devices,
        devices_per_worker=devices,
        one_node=isinstance(strategy, HogwildConfig),
        gpus_per_worker=gpus_per_worker,
        threads_per_worker=max(1, threads),
        spares=config.recovery.spares,
        faults=rehearsed,
        workers=tuple(
            WorkerPlan(
                global_rank=rank,
                dp_rank=mesh.dp_rank(rank),
                pp_rank=mesh.pp_rank(rank),
                samples_per_step=0 if rank in mesh.shards else samples[mesh.dp_rank(rank)],
                stages=pipeline.stages_of(mesh.pp_rank(rank)) if pipeline else (),
                shard=mesh.shard(rank),
            )
            for rank in range(mesh.world_size)
        ),
        pipeline=pipeline,
        split=None if not isinstance(strategy, StagedConfig) or strategy.split == "auto" else strategy.split,
        notes=tuple(notes),
    )


def _faults_to_rehearse(config: Config, world_size: int, errors: list[str]) -> tuple[Fault, ...]:
    rehearsed: list[Fault] = []
    for word in config.recovery.chaos:
        try:
            rehearsed += planned(word, seed=config.seed, steps=config.train.steps, num_ranks=world_size)
        except ValueError as e:
            errors.append(f"recovery.chaos={e}")
    return tuple(rehearsed)


def _shared_memory_errors(
    config: Config, nodes: tuple[Node, ...], device: str, num_workers: int, oversubscribe_cpus: bool
) -> list[str]:
    name, cpus = config.strategy.name, config.cluster.cpus_per_worker
    errors = []
    if device == "cuda":
        errors.append(
            f"strategy={name}: its workers share the memory of a machine, which GPUs cannot; "
            "set cluster.device=cpu, or use strategy=ddp"
        )
    room = num_workers if oversubscribe_cpus else max((_how_many(cpus, n.cpus) for n in nodes), default=0)
    if room < num_workers and not config.cluster.autoscaling:
        errors.append(
            f"strategy.num_workers={num_workers}: strategy={name} needs {num_workers} x {cpus:g} CPUs on one node, "
            f"there is room for {room} ({_inventory(nodes)}); lower it or cluster.cpus_per_worker, or use strategy=ddp"
        )
    return errors


def _workers_on_cpus(strategy: StrategyConfig) -> int:
    return 2 * strategy.pipeline_parallel_size if isinstance(strategy, DDPPipelineConfig) else 2


def _mesh(strategy: StrategyConfig, num_workers: int, errors: list[str]) -> Mesh:
    if isinstance(strategy, DPConfig):
        return Mesh()
    if isinstance(strategy, ParameterServerConfig):
        return Mesh(data_parallel_size=num_workers, num_shards=strategy.num_shards)
    if not isinstance(strategy, StagedConfig):
        return Mesh(data_parallel_size=num_workers)
    if not isinstance(strategy, DDPPipelineConfig):
        if num_workers < 2:
            errors.append(
                f"strategy.num_workers={num_workers}: strategy={strategy.name} needs at least 2, one per stage; "
                "use strategy=single for one"
            )
        return Mesh(pipeline_parallel_size=num_workers)
    p = strategy.pipeline_parallel_size
    if num_workers % p:
        near = " or ".join(str(n) for n in (num_workers // p * p, (num_workers // p + 1) * p) if n)
        errors.append(
            f"strategy.num_workers={num_workers}: not divisible by strategy.pipeline_parallel_size={p}; "
            f"set it to {near}"
        )
    return Mesh(
        data_parallel_size=max(1, num_workers // p),
        pipeline_parallel_size=p,
        replicas_close=strategy.close == "replicas",
    )


def _pipeline(config: Config, mesh: Mesh, errors: list[str]) -> PipelineLayout | None:
    """How the strategy's pipeline works; None where the model is not cut, or with ``errors``, to which it appends."""
    strategy, train, p = config.strategy, config.train, mesh.pipeline_parallel_size
    if not isinstance(strategy, StagedConfig):
        return None
    mesh_fits = not errors
    asked: int | Literal["auto"] = 1
    schedule, per_rank = SCHEDULES["GPipe"], 1
    if isinstance(strategy, PipelineConfig):
        asked, schedule = strategy.num_microbatches, SCHEDULES[strategy.schedule]
        per_rank = _stages_per_rank(strategy, schedule, errors)
    num_stages = p * per_rank
    if asked != "auto" and (error := schedule.microbatches_error(asked, num_stages, p)):
        errors.append(f"strategy.num_microbatches={asked}: {error}")

    def microbatches(global_batch_size: int) -> int | None:
        """Their number for a batch of this size; None: it cannot be cut into micro-batches of one size, which the
        stages' buffers have."""
        shares = set(even_shares(global_batch_size, mesh.data_parallel_size))
        slices = {share // train.grad_accumulation for share in shares}
        if 0 in slices or any(share % train.grad_accumulation for share in shares):
            return None
        if asked == "auto":
            return schedule.choose_microbatches(slices, num_stages, p)
        return None if any(n % asked for n in slices) else asked

    chosen = microbatches(train.global_batch_size)
    if chosen is None and mesh_fits:
        errors.append(_uneven(config, mesh, microbatches))
    if errors or chosen is None:
        return None
    return PipelineLayout(
        schedule=schedule.name,
        num_stages=num_stages,
        num_microbatches=chosen,
        stage_ranks=schedule.stage_ranks(num_stages, p),
    )


def _stages_per_rank(strategy: PipelineConfig, schedule: Schedule, errors: list[str]) -> int:
    asked, needed = strategy.stages_per_rank, schedule.stages_per_rank
    if asked == "auto":
        return needed
    if asked < needed or (asked > needed and not schedule.more_stages):
        least = "at least" if schedule.more_stages else "exactly"
        errors.append(f"strategy.stages_per_rank={asked}: {schedule.name} needs {least} {needed}; set it to {needed}")
    return asked


def _uneven(config: Config, mesh: Mesh, microbatches: Callable[[int], int | None]) -> str:
    """Says into what the batch cannot be cut, and the sizes next to it that can be."""
    strategy, train = config.strategy, config.train
    batch = train.global_batch_size
    pieces, keys = [], []
    if mesh.data_parallel_size > 1:
        pieces.append(f"{mesh.data_parallel_size} replicas")
    if train.grad_accumulation > 1:
        pieces.append(f"{train.grad_accumulation} slices")
        keys.append("train.grad_accumulation")
    if isinstance(strategy, PipelineConfig) and strategy.num_microbatches == "auto":
        pieces.append(f"micro-batches for {strategy.schedule}")
        keys.append("strategy.schedule")
    elif isinstance(strategy, PipelineConfig):
        pieces.append(f"{strategy.num_microbatches} micro-batches")
        keys.append("strategy.num_microbatches")
    below = next((n for n in range(batch - 1, 0, -1) if microbatches(n)), None)
    above = next(n for n in itertools.count(batch + 1) if microbatches(n))
    near = f"{below} or {above}" if below else f"{above}"
    return (
        f"train.global_batch_size={batch}: cannot be cut evenly into {' x '.join(pieces)}; "
        f"set it to {near}, or change {' or '.join(keys)}"
    )


def _placement(strategy: DDPPipelineConfig) -> str:
    if strategy.close == "replicas":
        return "placement: the replicas of a stage share a node where not everything does: gradients stay inside it"
    return "placement: the stages of a pipeline share a node where not everything does: activations stay inside it"


def _capacity_errors(
    config: Config, nodes: tuple[Node, ...], mesh: Mesh, devices: int, gpus: int, oversubscribe_cpus: bool
) -> list[str]:
    workers, cpus = mesh.world_size + config.recovery.spares, config.cluster.cpus_per_worker * devices
    by_cpu = [workers if oversubscribe_cpus else _how_many(cpus, n.cpus) for n in nodes]
    by_gpu = [n.gpus // gpus if gpus else workers for n in nodes]
    asked = f"strategy.num_workers={mesh.num_workers * devices}"
    if mesh.num_shards:
        asked += f" and strategy.num_shards={mesh.num_shards}"
    if config.recovery.spares:
        asked += f" and recovery.spares={config.recovery.spares}"
    if sum(by_gpu) < workers:
        together = " on one node" if devices > 1 else ""
        return [
            f"{asked}: needs {workers * gpus} GPUs{together}, the cluster has {sum(n.gpus for n in nodes)} "
            f"({_inventory(nodes)}); lower it, add nodes, or set cluster.device=cpu"
        ]
    room = sum(min(pair) for pair in zip(by_cpu, by_gpu, strict=True))
    if room < workers:
        return [
            f"{asked}: needs {workers} x {cpus:g} CPUs, there is room for {room} ({_inventory(nodes)}); "
            "lower it or cluster.cpus_per_worker, or add nodes"
        ]
    return []


def _ranks(ranks: range) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"


def _how_many(share: float, total: float) -> int:
    """Shares in a total. Ray counts in steps of 1/10000; in floating point 1.0 // 0.1 is 9."""
    return round(total * 10_000) // max(1, round(share * 10_000))


def _batch_errors(config: Config, num_workers: int) -> list[str]:
    train = config.train
    least = num_workers * train.grad_accumulation
    if train.global_batch_size >= least:
        return []
    slices = f" x {train.grad_accumulation} slices" if train.grad_accumulation > 1 else ""
    return [
        f"train.global_batch_size={train.global_batch_size}: smaller than "
        f"{num_workers} workers{slices}; "
        f"set it to at least {least}, or lower strategy.num_workers or train.grad_accumulation"
    ]


def _inventory(nodes: tuple[Node, ...]) -> str:
    listed = [f"{n.name}: {n.cpus:g} CPUs and {n.gpus} GPUs" for n in nodes[:MOST_NODES_LISTED]]
    more = [f"and {len(nodes) - len(listed)} more nodes"] if len(nodes) > len(listed) else []
    return ", ".join(listed + more) or "no nodes"

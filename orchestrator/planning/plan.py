"""What will run where: a pure function of the configuration and the cluster. No Ray, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from orchestrator.config.build import ConfigError
from orchestrator.config.schema import Config
from orchestrator.planning.faults import Fault, planned
from orchestrator.planning.layout import LayoutRules
from orchestrator.planning.mesh import Mesh, even_shares
from orchestrator.planning.schedules import PipelineLayout

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


def make_plan(config: Config, rules: type[LayoutRules], nodes: tuple[Node, ...], *, oversubscribe_cpus: bool) -> Plan:
    """Lay the run out over ``nodes`` by the ``rules`` of its strategy.

    ``oversubscribe_cpus``: CPUs are only shares of this machine (an embedded Ray), never a limit.

    Raises:
        ConfigError: with every error, each naming the key to change.
    """
    errors: list[str] = []
    notes: list[str] = []
    strategy, train, cluster = config.strategy, config.train, config.cluster
    total_gpus = sum(n.gpus for n in nodes)
    device: Literal["cpu", "cuda"] = "cpu"
    if cluster.device == "cuda" or (cluster.device == "auto" and total_gpus > 0):
        device = "cuda"

    num_workers = strategy.num_workers
    assert not isinstance(num_workers, tuple), "each size of an elastic run has a plan of its own"
    if num_workers == "auto":
        num_workers = rules.default_num_workers(strategy, num_gpus=total_gpus if device == "cuda" else 0)
    layout = rules.plan_layout(config, num_workers, errors)
    mesh, pipeline, devices = layout.mesh, layout.pipeline, layout.devices_per_worker
    gpus_per_worker = devices if device == "cuda" else 0
    if rules.cpu_only and device == "cuda":
        errors.append(f"strategy={strategy.name}: {rules.cpu_only}; set cluster.device=cpu, or use strategy=ddp")
    if layout.one_node:
        errors += _one_node_errors(config, nodes, num_workers, oversubscribe_cpus)
    elif device == "cuda" and total_gpus == 0 and not cluster.autoscaling:
        errors.append(f"cluster.device=cuda: no node has a GPU ({_inventory(nodes)}); use cpu or auto")
    elif not cluster.autoscaling:
        errors += _capacity_errors(config, nodes, mesh, devices, gpus_per_worker, oversubscribe_cpus)
    if mesh.pipeline_parallel_size == 1:
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
    notes += layout.notes
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
        one_node=layout.one_node,
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
        split=layout.split,
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


def _one_node_errors(config: Config, nodes: tuple[Node, ...], num_workers: int, oversubscribe_cpus: bool) -> list[str]:
    name, cpus = config.strategy.name, config.cluster.cpus_per_worker
    room = num_workers if oversubscribe_cpus else max((_how_many(cpus, n.cpus) for n in nodes), default=0)
    if room >= num_workers or config.cluster.autoscaling:
        return []
    return [
        f"strategy.num_workers={num_workers}: strategy={name} needs {num_workers} x {cpus:g} CPUs on one node, "
        f"there is room for {room} ({_inventory(nodes)}); lower it or cluster.cpus_per_worker, or use strategy=ddp"
    ]


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

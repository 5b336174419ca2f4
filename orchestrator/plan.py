"""What will run where: a pure function of the configuration and the cluster. No Ray, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from orchestrator.config.build import ConfigError
from orchestrator.config.schema import Config
from orchestrator.mesh import Mesh, even_shares

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
    global_rank: int
    dp_rank: int
    pp_rank: int
    samples_per_step: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything decided before Ray starts an actor."""

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
    threads_per_worker: int
    workers: tuple[WorkerPlan, ...]
    notes: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        return self.mesh.world_size


def make_plan(config: Config, nodes: tuple[Node, ...], *, oversubscribe_cpus: bool) -> Plan:
    """Lay the run out over ``nodes``.

    ``oversubscribe_cpus``: CPUs are only shares of this machine (an embedded Ray), never a limit.

    Raises:
        ConfigError: with every fault, each naming the key to change.
    """
    faults: list[str] = []
    notes: list[str] = []
    strategy, train, cluster = config.strategy, config.train, config.cluster
    total_gpus = sum(n.gpus for n in nodes)
    device: Literal["cpu", "cuda"] = "cpu"
    if cluster.device == "cuda" or (cluster.device == "auto" and total_gpus > 0):
        device = "cuda"

    num_workers = strategy.num_workers
    if num_workers == "auto":
        num_workers = total_gpus if device == "cuda" and total_gpus else 2
        if strategy.name == "single":
            num_workers = 1
    mesh = Mesh(data_parallel_size=num_workers)

    gpus_per_worker = 1 if device == "cuda" else 0
    if device == "cuda" and total_gpus == 0 and not cluster.autoscaling:
        faults.append(f"cluster.device=cuda: no node has a GPU ({_inventory(nodes)}); use cpu or auto")
    elif not cluster.autoscaling:
        faults += _capacity_faults(config, nodes, num_workers, gpus_per_worker, oversubscribe_cpus)
    faults += _batch_faults(config, mesh)
    cores = sum(n.cpus for n in nodes)
    threads = int(cores // num_workers if oversubscribe_cpus else cluster.cpus_per_worker)
    if device == "cpu" and oversubscribe_cpus and num_workers > cores:
        notes.append(f"{num_workers} workers share {cores:g} cores: expect no speed-up from them")
    if faults:
        raise ConfigError(faults)

    samples = even_shares(train.global_batch_size, mesh.data_parallel_size)
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
        cpus_per_worker=cluster.cpus_per_worker,
        gpus_per_worker=gpus_per_worker,
        threads_per_worker=max(1, threads),
        workers=tuple(
            WorkerPlan(
                global_rank=rank,
                dp_rank=mesh.dp_rank(rank),
                pp_rank=mesh.pp_rank(rank),
                samples_per_step=samples[mesh.dp_rank(rank)],
            )
            for rank in range(mesh.world_size)
        ),
        notes=tuple(notes),
    )


def _capacity_faults(
    config: Config, nodes: tuple[Node, ...], workers: int, gpus: int, oversubscribe_cpus: bool
) -> list[str]:
    cpus = config.cluster.cpus_per_worker
    by_cpu = [workers if oversubscribe_cpus else _how_many(cpus, n.cpus) for n in nodes]
    by_gpu = [n.gpus // gpus if gpus else workers for n in nodes]
    asked = f"strategy.num_workers={workers}"
    if sum(by_gpu) < workers:
        return [
            f"{asked}: needs {workers * gpus} GPUs, the cluster has {sum(n.gpus for n in nodes)} "
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


def _batch_faults(config: Config, mesh: Mesh) -> list[str]:
    train = config.train
    least = mesh.data_parallel_size * train.grad_accumulation
    if train.global_batch_size >= least:
        return []
    slices = f" x {train.grad_accumulation} slices" if train.grad_accumulation > 1 else ""
    return [
        f"train.global_batch_size={train.global_batch_size}: smaller than "
        f"{mesh.data_parallel_size} workers{slices}; "
        f"set it to at least {least}, or lower strategy.num_workers or train.grad_accumulation"
    ]


def _inventory(nodes: tuple[Node, ...]) -> str:
    listed = [f"{n.name}: {n.cpus:g} CPUs and {n.gpus} GPUs" for n in nodes[:MOST_NODES_LISTED]]
    more = [f"and {len(nodes) - len(listed)} more nodes"] if len(nodes) > len(listed) else []
    return ", ".join(listed + more) or "no nodes"

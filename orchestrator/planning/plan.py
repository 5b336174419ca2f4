"""The plan of a run, a pure function of the configuration and the cluster. Imports neither Ray nor torch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from orchestrator.config.build import ConfigError
from orchestrator.config.schema import Config
from orchestrator.planning.capacity import (
    device_errors,
    find_workers_per_node,
    gpus_of_worker,
    memory_limit,
    tightest_node,
)
from orchestrator.planning.faults import Fault, parse_entry
from orchestrator.planning.layout import Layout, LayoutRules
from orchestrator.planning.memory import UNKNOWN, MemoryLimit, NodeShare
from orchestrator.planning.mesh import TOGETHER, Mesh, Resources, even_shares
from orchestrator.planning.schedules import PipelineLayout


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node of the cluster, its IP address, and its total resources, free or in use.

    Attributes:
        memory_bytes: 0 if it is unknown.
        gpu_memory_bytes: the memory of its smallest GPU; 0 if it is unknown.
        gpu_name: of its first GPU, as Ray or torch calls it; empty if it is unknown.
    """

    node_id: str
    name: str
    cpus: float
    gpus: int
    address: str = ""
    memory_bytes: int = 0
    gpu_memory_bytes: int = 0
    gpu_name: str = ""

    @property
    def place(self) -> str:
        """The node as shown to users: ``host (address)``."""
        return f"{self.name} ({self.address})"

    @property
    def resources(self) -> Resources:
        """Its resources by the names that Ray uses."""
        return {"CPU": self.cpus, "GPU": self.gpus}


@dataclass(frozen=True, kw_only=True)
class WorkerPlan:
    """The part of a rank in the run.

    Attributes:
        samples_per_step: its share of the global batch.
        stages: empty if the model is not cut.
        server: the index of the parameter server that the rank is; None for a worker.
    """

    global_rank: int
    dp_rank: int
    pp_rank: int
    samples_per_step: int
    stages: tuple[int, ...] = ()
    server: int | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that is decided before Ray starts an actor.

    Attributes:
        steps: the steps of the run; 0 if they are unknown.
        workers: an entry for each rank, in order.
        split: the layers at which the stages after the first begin; None to balance them by measured time.
        divided: what workers have shards of, for users; None if they have all of it whole.
        processes_per_core: counts servers and spares, too.
        memory: what a worker has.
        node: the host memory that workers of a node share.
        notes: remarks for the user.
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
    loader_processes: int
    spares: int
    workers: tuple[WorkerPlan, ...]
    pipeline: PipelineLayout | None = None
    split: tuple[str, ...] | None = None
    divided: Literal["each tensor", "the optimizer's state"] | None = None
    processes_per_core: float = 1.0
    memory: MemoryLimit = UNKNOWN
    node: NodeShare = field(default_factory=NodeShare)
    faults: tuple[Fault, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        """The number of workers and servers."""
        return self.mesh.world_size

    def describe(self) -> str:
        """Return how the model and the batch are divided, for users."""
        text = f"data parallel {self.mesh.data_parallel_size}"
        if self.divided is not None:
            text += f", {self.divided} divided over {self.mesh.num_shards}"
        sizes = {dimension: self.mesh.size(dimension) for dimension in ("pipeline", *TOGETHER)}
        return text + "".join(f" x {name} {size}" for name, size in sizes.items() if size > 1)

    @property
    def rows_of_pass(self) -> float:
        """The number of samples in a forward pass of a worker, in the mean."""
        if self.pipeline is not None:
            return self.microbatch_rows
        return self.workers[0].samples_per_step / self.grad_accumulation

    @property
    def microbatch_rows(self) -> int:
        """The number of samples in a micro-batch of a pipeline, the same in all its replicas."""
        assert self.pipeline is not None
        return self.workers[0].samples_per_step // self.grad_accumulation // self.pipeline.num_microbatches

    def display_name(self, global_rank: int) -> str:
        """Return the rank as shown to users: ``rank 1``, ``rank 0 (stages 0 and 3)`` or ``rank 2 (server 0)``."""
        stages, server = self.workers[global_rank].stages, self.workers[global_rank].server
        if server is not None:
            return f"rank {global_rank} (server {server})"
        if not stages:
            return f"rank {global_rank}"
        noun = "stage" if len(stages) == 1 else "stages"
        return f"rank {global_rank} ({noun} {' and '.join(str(s) for s in stages)})"


MAX_LOADER_PROCESSES = 8
"""The number of data-loading processes per worker that ``auto`` does not exceed, because each has a copy of the job."""


def make_plan(
    config: Config, rules: type[LayoutRules[Any]], nodes: tuple[Node, ...], *, oversubscribe_cpus: bool
) -> Plan:
    """Lay out the run on ``nodes`` by the ``rules`` of its strategy.

    Args:
        config: the configuration; ``strategy.num_workers`` is a number or ``auto``, not a range.
        rules: the layout rules of ``config.strategy``.
        nodes: the nodes of the cluster.
        oversubscribe_cpus: whether more CPUs may be requested than there are. True for an embedded Ray, where they are
            only shares of this machine.

    Returns:
        The plan, with notes for the user.

    Raises:
        ConfigError: with every error, each of which names the key to change.
    """
    found = find_layout(config, rules, nodes, oversubscribe_cpus=oversubscribe_cpus)
    layout, device, num_workers, faults = found.layout, found.device, found.num_workers, found.faults
    train, cluster = config.train, config.cluster
    # Not mesh.world_size: for strategy=dp, num_workers counts the devices of its one process.
    num_processes = num_workers + layout.mesh.num_servers
    num_cores = sum(n.cpus for n in nodes)
    num_threads = int(num_cores // num_processes if oversubscribe_cpus else cluster.cpus_per_worker)
    samples = even_shares(train.global_batch_size, layout.mesh.data_parallel_size)
    notes = _notes(layout, samples, faults) + _device_notes(config, rules, nodes, device)
    if device == "cpu" and oversubscribe_cpus and num_processes > num_cores:
        processes = "workers and servers" if layout.mesh.num_servers else "workers"
        notes.insert(0, f"{num_processes} {processes} share {num_cores:g} cores: expect no speed-up")
    division = rules.division(config.strategy, layout.mesh)
    if division is not None and division.on_host and num_threads <= 1 and not oversubscribe_cpus:
        notes.append(
            "strategy.cpu_offload=true: each worker makes its updates on the CPU, with 1 thread; "
            "cluster.cpus_per_worker=8 gives it 8 CPUs and as many threads"
        )
    loader_processes = _loader_processes(config, nodes, device)
    if loader_processes and config.data.num_workers == "auto":
        notes.append(f"data.num_workers=auto: {loader_processes} data-loading processes per worker")
    return Plan(
        run_name=config.run_name,
        strategy=config.strategy.name,
        job=config.job_name,
        steps=0 if rules.runs_script else train.steps,
        global_batch_size=train.global_batch_size,
        grad_accumulation=train.grad_accumulation,
        mesh=layout.mesh,
        device=device,
        cpus_per_worker=cluster.cpus_per_worker * layout.devices_per_worker,
        gpus_per_worker=gpus_of_worker(layout, device),
        devices_per_worker=layout.devices_per_worker,
        one_node=layout.one_node,
        threads_per_worker=max(1, num_threads),
        loader_processes=loader_processes,
        spares=config.recovery.spares,
        workers=_worker_plans(layout, samples),
        pipeline=layout.pipeline,
        split=layout.split,
        divided=None if division is None else division.divided,
        processes_per_core=(layout.mesh.world_size + config.recovery.spares) / max(1.0, num_cores),
        memory=memory_limit(config, nodes, device),
        node=tightest_node(nodes, found.workers_per_node, num_processes),
        faults=faults,
        notes=tuple(notes),
    )


@dataclass(frozen=True, kw_only=True)
class FoundLayout:
    """A layout, and what it follows from. ``workers_per_node``: see :func:`find_workers_per_node`."""

    layout: Layout
    device: Literal["cpu", "cuda"]
    num_workers: int
    workers_per_node: list[int]
    faults: tuple[Fault, ...]


def find_layout(
    config: Config, rules: type[LayoutRules[Any]], nodes: tuple[Node, ...], *, oversubscribe_cpus: bool
) -> FoundLayout:
    """Return the layout of the run, after all checks of :func:`make_plan`. The cost does not grow with its size.

    Raises:
        ConfigError: see :func:`make_plan`.
    """
    errors = _unsupported(config, rules)
    device = _device(config, rules, nodes)
    num_workers = _num_workers(config, rules, nodes, device)
    workers_per_node = find_workers_per_node(config, nodes, device, num_workers, oversubscribe_cpus)
    options, notes = rules.on_nodes(config.strategy, num_workers, workers_per_node=workers_per_node)
    layout = rules.plan_layout(options, config.train, num_workers, errors)
    layout = replace(layout, notes=(*layout.notes, *notes))
    errors += device_errors(config, rules, layout, nodes, device, num_workers, oversubscribe_cpus)
    if layout.mesh.pipeline == 1 and not rules.runs_script:
        errors += _batch_errors(config, num_workers // layout.mesh.workers_per_sample)
    faults = _faults_to_inject(config, layout.mesh.world_size, errors)
    if errors:
        raise ConfigError(errors)
    return FoundLayout(
        layout=layout, device=device, num_workers=num_workers, workers_per_node=workers_per_node, faults=faults
    )


def _unsupported(config: Config, rules: type[LayoutRules[Any]]) -> list[str]:
    name, decay, precision = config.strategy.name, config.train.ema_decay, config.train.precision
    errors = []
    if decay is not None and not rules.averages_weights:
        errors.append(
            f"train.ema_decay={decay:g}: strategy={name} keeps no average of the weights; set it to null, "
            "or use strategy=ddp"
        )
    if (every := config.train.histograms_every) and not rules.observes_gradients:
        errors.append(
            f"train.histograms_every={every}: strategy={name} never has the gradient of a whole step on a worker; set "
            "it to 0, or use strategy=ddp"
        )
    if reason := rules.refused_precisions.get(precision):
        errors.append(f"train.precision={precision}: strategy={name}: {reason}; set it to bf16 or fp32")
    return errors


def _device(config: Config, rules: type[LayoutRules[Any]], nodes: tuple[Node, ...]) -> Literal["cpu", "cuda"]:
    if config.cluster.device != "auto":
        return config.cluster.device
    return "cuda" if any(n.gpus for n in nodes) and not rules.cpu_only else "cpu"


def _num_workers(config: Config, rules: type[LayoutRules[Any]], nodes: tuple[Node, ...], device: str) -> int:
    num_workers = config.strategy.num_workers
    assert not isinstance(num_workers, tuple), "each size of an elastic run has its own plan"
    if num_workers != "auto":
        return num_workers
    gpus = [n.gpus for n in nodes if n.gpus] if device == "cuda" else []
    return rules.default_num_workers(config.strategy, gpus=gpus, spares=config.recovery.spares)


def _worker_plans(layout: Layout, samples: tuple[int, ...]) -> tuple[WorkerPlan, ...]:
    """Return the plan of each rank. ``samples``: the samples per step of each replica."""
    mesh, pipeline = layout.mesh, layout.pipeline
    stages = pipeline.stages_by_rank() if pipeline else {}
    return tuple(
        WorkerPlan(
            global_rank=rank,
            dp_rank=mesh.dp_rank(rank),
            pp_rank=mesh.coords(rank).pipeline,
            samples_per_step=0 if rank in mesh.servers else samples[mesh.dp_rank(rank)],
            stages=stages.get(mesh.coords(rank).pipeline, ()),
            server=mesh.server(rank),
        )
        for rank in range(mesh.world_size)
    )


def _loader_processes(config: Config, nodes: tuple[Node, ...], device: Literal["cpu", "cuda"]) -> int:
    """Return the number of data-loading processes per worker.

    ``auto`` leaves one of the cores of each GPU to the worker, and takes none while no node with a GPU is known.
    """
    if config.data.num_workers != "auto":
        return config.data.num_workers
    if device == "cpu":
        return 0
    cores_per_gpu = min((int(node.cpus // node.gpus) for node in nodes if node.gpus), default=1)
    return max(0, min(cores_per_gpu - 1, MAX_LOADER_PROCESSES))


def _notes(layout: Layout, samples: tuple[int, ...], faults: tuple[Fault, ...]) -> list[str]:
    notes = list(layout.notes)
    if faults:
        notes.append(f"faults to inject: {', '.join(map(str, faults))}")
    if len(set(samples)) > 1:
        notes.append(
            f"shares of the batch differ ({samples[0]} and {samples[-1]} samples); the loss is weighted accordingly"
        )
    return notes


def _device_notes(config: Config, rules: type[LayoutRules[Any]], nodes: tuple[Node, ...], device: str) -> list[str]:
    if device != "cpu":
        if config.train.precision != "auto" or "bf16" in rules.refused_precisions:
            return []
        return ["train.precision=auto: bf16 if all GPUs have it, else fp32"]
    notes = []
    if rules.cpu_only and config.cluster.device == "auto" and any(n.gpus for n in nodes):
        notes.append(f"strategy={config.strategy.name} leaves the GPUs unused: {rules.cpu_only}")
    if config.train.precision == "tf32":
        notes.append("train.precision=tf32: CPUs compute in float32, as with fp32")
    return notes


def _faults_to_inject(config: Config, world_size: int, errors: list[str]) -> tuple[Fault, ...]:
    faults: list[Fault] = []
    for word in config.recovery.chaos:
        try:
            faults += parse_entry(word, seed=config.seed, steps=config.train.steps, num_ranks=world_size)
        except ValueError as e:
            errors.append(f"recovery.chaos={e}")
    return tuple(faults)


def _batch_errors(config: Config, num_workers: int) -> list[str]:
    train = config.train
    minimum = num_workers * train.grad_accumulation
    if train.global_batch_size >= minimum:
        return []
    slices, or_accumulation = "", ""
    if train.grad_accumulation > 1:
        slices = f" x {train.grad_accumulation} slices"
        or_accumulation = " or train.grad_accumulation"
    return [
        f"train.global_batch_size={train.global_batch_size}: fewer than one sample for each of "
        f"{num_workers} workers{slices}; set it to at least {minimum}, or lower strategy.num_workers{or_accumulation}"
    ]

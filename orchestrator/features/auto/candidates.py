"""The layouts of a job on the nodes that are here, with their predicted times, as `orchestrator plan` has them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

from orchestrator.config.build import ConfigError
from orchestrator.config.schema import Config
from orchestrator.features.auto.choice import Contender, server_counts, worker_counts
from orchestrator.features.auto.strategies import AutoConfig
from orchestrator.features.plan.layouts import Layouts, best_of_each, usual_stack
from orchestrator.features.plan.model_work import with_cpus
from orchestrator.features.plan.prediction.cost import StepTime
from orchestrator.features.plan.prediction.devices import (
    CPU,
    LARGEST,
    Cluster,
    Tables,
    name_of_gpu,
    parse_cluster,
    read_tables,
)
from orchestrator.features.plan.prediction.forecast import DEVICE_HOURS, Forecast, Question
from orchestrator.features.plan.traced_job import TracedJob
from orchestrator.job import Job
from orchestrator.planning.memory import GIB
from orchestrator.planning.mesh import DIMENSIONS
from orchestrator.planning.plan import Node, Plan
from orchestrator.strategies import registry
from orchestrator.strategies.keys import mesh_config

GAINED = 0.85
"""The exponent of threads by which a process gets faster."""
KEPT = ("train.grad_accumulation", "train.activation_checkpointing")
"""The keys of layouts that a choice does not change."""
PAIR_BYTES = 8.0
"""The bytes that a server and two workers exchange for a parameter, which takes as long as a sum over two replicas."""
NAMES = {
    frozenset[str](): "single",
    frozenset({"replicate"}): "ddp",
    frozenset({"shard"}): "fsdp",
    frozenset({"replicate", "shard"}): "hsdp",
    frozenset({"pipeline"}): "pipeline",
    frozenset({"pipeline", "replicate"}): "ddp_pipeline",
    frozenset({"pipeline", "shard"}): "fsdp_pipeline",
}
"""What products of dimensions are called; all others are a ``mesh``."""


@dataclass(frozen=True, kw_only=True)
class Here:
    """The nodes that are here.

    Attributes:
        config: of a launch with ``strategy=auto``.
        plan: on as many workers as there may be.
        shares_cores: whether all processes share the cores of the nodes, however many they are.
        tables: with the CPU as it was measured, for a plan on CPUs.
    """

    config: Config
    plan: Plan
    nodes: tuple[Node, ...]
    shares_cores: bool
    tables: Tables

    @classmethod
    def measured(cls, config: Config, plan: Plan, nodes: tuple[Node, ...], *, shares_cores: bool) -> Here:
        """Return the nodes, with the rates of a CPU of this machine if the workers compute on CPUs."""
        tables = read_tables()
        tables = with_cpus(tables) if plan.device == "cpu" else tables
        return cls(config=config, plan=plan, nodes=nodes, shares_cores=shares_cores, tables=tables)

    def cluster(self, processes: int) -> Cluster:
        """Return the devices of so many workers and servers: GPUs, or the cores that each process has."""
        if self.plan.device == "cuda":
            return self._gpus()
        cores = sum(node.cpus for node in self.nodes) or 1
        threads = cores / processes if self.shares_cores else float(self.plan.threads_per_worker)
        per_node = max(
            1, int(max((node.cpus for node in self.nodes), default=1) // self.config.cluster.cpus_per_worker)
        )
        sharing = min(processes, per_node)
        core, link = self.tables.devices[CPU], self.tables.links[CPU]
        of_node = min((node.memory_bytes for node in self.nodes), default=0) / GIB or core.memory_gib * core.node
        device = replace(
            core,
            bf16=core.bf16 * threads**GAINED,
            memory_gb_s=core.memory_gb_s * threads**GAINED,
            memory_gib=of_node / sharing,
        )
        return Cluster(
            nodes=max(1, len(self.nodes)), per_node=per_node, name=CPU, device=device, inside=link, between=link
        )

    def _gpus(self) -> Cluster:
        """Return the GPUs; of a kind that is not in the tables, with the rates of one that has about as much memory."""
        with_gpus = [node for node in self.nodes if node.gpus]
        if not with_gpus:
            raise ConfigError(["no node with a GPU is here yet"])
        memory_gib = min(node.gpu_memory_bytes for node in with_gpus) / GIB
        devices = self.tables.devices
        name = name_of_gpu(with_gpus[0].gpu_name, memory_gib, self.tables) or min(
            devices, key=lambda name: abs(devices[name].memory_gib - memory_gib)
        )
        each = min(min(node.gpus for node in with_gpus), devices[name].node)
        found = parse_cluster(f"{sum(node.gpus for node in with_gpus) // each}x{each}x{name}", self.tables)
        device = replace(found.device, memory_gib=memory_gib or LARGEST)
        return replace(found, device=device)

    def candidates(self, job: Job) -> list[tuple[Contender, StepTime | None]]:
        """Return the layouts with their times, the fastest first; without one if it is not predicted, or cannot be.

        Raises:
            ConfigError: the model cannot be traced.
        """
        on_gpus = self.plan.device == "cuda"
        config = self.config
        if config.train.precision == "auto":
            config = replace(config, train=replace(config.train, precision="bf16" if on_gpus else "fp32"))
        traced = TracedJob(config, job, on_gpus=on_gpus)
        found = [c for n in worker_counts(self.plan.world_size) for c in self._of_size(config, traced, n)]
        return sorted(found, key=lambda c: c[0].expected_ms)

    def _of_size(self, config: Config, job: TracedJob, workers: int) -> Iterator[tuple[Contender, StepTime | None]]:
        candidates = {*AutoConfig.of(self.config.strategy).candidates} & {*registry.NAMES}
        typed = f"strategy.num_workers={workers}"
        question = self._question(config, job, workers)
        every = [question.answered(f) for f in self._layouts(config, job, "mesh", workers).forecasts()]
        found = [(_name(f), _overrides(f, workers), f) for f in best_of_each(every)]
        if workers > 1:
            with contextlib.suppress(ConfigError):
                staged = self._layouts(config, job, "model_parallel", workers).as_configured()
                found.append(("model_parallel", ("strategy=model_parallel", typed), question.answered(staged)))
        replicas = [f for name, _, f in found if name == "ddp" and self.plan.device == "cpu"]
        for servers in server_counts(workers) if replicas else ():
            words = ("strategy=parameter_server", typed, f"strategy.num_shards={servers}")
            found.append(("parameter_server", words, question.answered(_served(replicas[0], servers))))
        for name, overrides, forecast in found:
            if name in candidates:
                contender = Contender(
                    overrides=overrides,
                    world_size=forecast.mesh.world_size,
                    predicted_ms=None if forecast.time is None else 1e3 * forecast.seconds,
                    memory_bytes=forecast.memory_bytes,
                    refused=forecast.refused,
                )
                yield contender, forecast.time
        if "dp" in candidates and workers == self.plan.world_size > 1:
            yield Contender(overrides=("strategy=dp", typed), world_size=1), None

    def _layouts(self, config: Config, job: TracedJob, name: str, workers: int) -> Layouts:
        schedules = AutoConfig.of(self.config.strategy).schedules
        config = replace(config, strategy=mesh_config(name, num_workers=workers))
        return Layouts(
            config, job, workers, self.nodes, KEPT, schedules=schedules, oversubscribe_cpus=self.shares_cores
        )

    def _question(self, config: Config, job: TracedJob, processes: int) -> Question:
        cluster = self.cluster(processes)
        stack, _ = usual_stack(cluster, config, job.work)
        return Question(work=job.work, cluster=cluster, stack=stack, device_hours=DEVICE_HOURS)


def untraced(options: AutoConfig, workers: int) -> list[Contender]:
    """Return the layouts of a job of which nothing is known: each has to be measured."""
    found: list[tuple[str, ...]] = [("strategy=single",)]
    for n in worker_counts(workers)[1:]:
        typed = f"strategy.num_workers={n}"
        found += [("strategy=ddp", typed), ("strategy=fsdp", typed)]
        found += [("strategy=parameter_server", typed, "strategy.num_shards=1")]
    found += [("strategy=dp", f"strategy.num_workers={workers}")] * (workers > 1)
    candidates = {*options.candidates} & {*registry.NAMES}
    return [Contender(overrides=words) for words in found if words[0].removeprefix("strategy=") in candidates]


def _served(replicas: Forecast, servers: int) -> Forecast:
    """Return what replicas would be like that send gradients to servers, and receive parameters."""
    exchanged = PAIR_BYTES * max(1.0, replicas.mesh.replicate / (2 * servers))
    mesh = replace(replicas.mesh, num_servers=servers)
    return replace(replicas, step=replace(replicas.step, mesh=mesh, exchanged_bytes=exchanged), time=None)


def _name(forecast: Forecast) -> str:
    """Return what a layout is called among the candidates."""
    sizes = frozenset[str](d for d in DIMENSIONS if forecast.mesh.size(d) > 1)
    return "mesh" if forecast.step.divides_update else NAMES.get(sizes, "mesh")


def _overrides(forecast: Forecast, workers: int) -> tuple[str, ...]:
    """Return a layout as it is typed, by the name of a preset where one has no other keys."""
    mesh, typed = forecast.mesh, f"strategy.num_workers={workers}"
    passes = [o for o in forecast.overrides if o.startswith(("strategy.schedule=", "strategy.num_microbatches="))]
    match _name(forecast):
        case "single":
            return ("strategy=single",)
        case "ddp" | "fsdp" as name:
            return f"strategy={name}", typed
        case "hsdp":
            return "strategy=hsdp", typed, f"strategy.shard_size={mesh.shard}"
        case "pipeline":
            return "strategy=pipeline", typed, *passes
        case "ddp_pipeline":
            return "strategy=ddp_pipeline", typed, f"strategy.pipeline_parallel_size={mesh.pipeline}", *passes
    return "strategy=mesh", typed, *forecast.overrides

"""The layouts that a job may have on a cluster that is not here, each checked and measured for memory."""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

from orchestrator.compat.pipelining import computations
from orchestrator.config.build import ConfigError
from orchestrator.config.schema import Config
from orchestrator.config.text import format_override
from orchestrator.job import Job
from orchestrator.planning.memory import GIB, Division, ParameterSize, WorkerMemory, worker_memory
from orchestrator.planning.plan import FoundLayout, Node, find_layout
from orchestrator.planning.schedules import PipelineLayout
from orchestrator.prediction.cost import Step
from orchestrator.prediction.devices import CPU, Cluster
from orchestrator.prediction.forecast import Forecast
from orchestrator.strategies import registry
from orchestrator.strategies.base import Strategy
from orchestrator.strategies.constructor import Outline
from orchestrator.strategies.memory_plan import parameter_sizes
from orchestrator.strategies.model_work import Recomputed, traced
from orchestrator.strategies.presets.product import MeshConfig
from orchestrator.strategies.transforms.tensor import assumed_division
from orchestrator.timeline import UNIT_TIMES, busy_s, extent_s, simulate

LARGEST = {"pipeline": 64, "tensor": 8, "context": 8}
"""The largest sizes of dimensions that are tried."""
LEAST_TOKENS = 4096
"""The tokens of a sample that a device has at least if others have the rest."""
SCHEDULES = ("1F1B", "Interleaved1F1B")
LARGEST_ROWS = 64
REPLAYED = 8
"""The workers of a pipeline whose schedule is replayed; longer ones wait in proportion."""

SUMMED_BYTES, UPDATED_BYTES = 8.0, 4.0
"""What replicas exchange for a parameter: the sum of its gradient in float32, there and back, and what is updated."""


class Layouts:
    """The layouts of a job.

    Attributes:
        pruned: how many sizes and layouts the product refuses, by reason.
    """

    def __init__(self, config: Config, job: Job, cluster: Cluster, given: Collection[str]):
        """Trace the model.

        Args:
            config: the configuration of a launch.
            cluster: where it would be trained.
            given: the keys that stay as they are.

        Raises:
            ConfigError: the model cannot be traced.
        """
        self._config, self._cluster, self._given = config, cluster, given
        self.pruned: Counter[str] = Counter()
        on_cpus = cluster.name == CPU
        self._outline = Outline(job, config.train)
        try:
            self.traced = traced(self._outline, fused_attention=not on_cpus)
        except Exception as e:  # whatever the job raises with fake tensors
            reason = f"the model cannot be traced with tensors that have no values: {type(e).__name__}: {e}"
            raise ConfigError([f"{reason}; let Job.forward and Job.loss read none, as .item() does"]) from e
        model = self._outline.model
        assert model is not None
        self._model = model
        self._sizes: list[ParameterSize] = parameter_sizes(config, job, model)
        memory = int(cluster.device.memory_gib * GIB)
        # What nodes decide differs from strategy to strategy; for a mesh, it is only how many devices there are.
        merged = isinstance(config.strategy, MeshConfig)
        nodes, devices = (1, cluster.devices) if merged else (cluster.nodes, cluster.per_node)
        each = config.cluster.cpus_per_worker
        self._nodes = tuple(
            Node(
                node_id=str(i),
                name=f"node{i}",
                cpus=devices * each,
                gpus=0 if on_cpus else devices,
                memory_bytes=devices * memory,
                gpu_memory_bytes=memory,
            )
            for i in range(nodes)
        )
        self._gathered: dict[tuple[type[Strategy], int], float] = {}
        self._state = functools.cache(self._state_of)
        self._job = job
        self._divided = functools.cache(functools.partial(assumed_division, model))

    def as_configured(self) -> Forecast:
        """Return the layout that the configuration names, without its time.

        Raises:
            ConfigError: the product refuses it.
        """
        rules = registry.load(self._config.strategy.name)
        return self._forecast(self._config, find_layout(self._config, rules, self._nodes, oversubscribe_cpus=False), {})

    def forecasts(self) -> Iterator[Forecast]:
        """Yield every layout that the product does not refuse, without its time."""
        recomputes = self._free("train.activation_checkpointing", ("none", "blocks"))
        for keys in (keys for of_mesh in self._meshes() for keys in self._passes(of_mesh)):
            try:
                config = self._with(keys)
                rules = registry.load(config.strategy.name)
                found = find_layout(config, rules, self._nodes, oversubscribe_cpus=False)
            except (ConfigError, ValueError) as e:
                self._refuse(str(e))
                continue
            for recompute in recomputes:
                yield self._forecast(self._with({**keys, **recompute}), found, {**keys, **recompute})

    def _meshes(self) -> Iterator[dict[str, Any]]:
        devices, layers = self._cluster.devices, self.traced.work.layers
        if not isinstance(self._config.strategy, MeshConfig):
            yield {}
            return
        most_stages = min(LARGEST["pipeline"], layers)
        cuts = [
            {**tensor, **context, **pipeline}
            for tensor in self._free("strategy.tensor", _powers(LARGEST["tensor"]))
            for context in self._free("strategy.context", self._context_sizes())
            for pipeline in self._free("strategy.pipeline", _powers(most_stages))
        ]
        for cut in cuts:
            rest, beyond = divmod(devices, math.prod(self._size(cut, d) for d in LARGEST))
            schedules = self._free("strategy.schedule", SCHEDULES) if self._size(cut, "pipeline") > 1 else [{}]
            for shard in self._free("strategy.shard", _powers(rest)):
                if beyond or rest % self._size(shard, "shard"):
                    continue
                divides = self._size(shard, "shard") * self._size(cut, "context") > 1
                for optimizer in self._free("strategy.shard_optimizer", (False, True)) if divides else [{}]:
                    yield from ({**cut, **shard, **optimizer, **schedule} for schedule in schedules)

    def _context_sizes(self) -> list[int]:
        tokens = self.traced.work.tokens
        fitting = (size for size in _powers(LARGEST["context"]) if tokens % (2 * size) == 0)
        return [size for size in fitting if tokens >= size * LEAST_TOKENS] or [1]

    def _passes(self, keys: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the keys with each number of samples that a pass may have."""
        parts = math.prod(self._size(keys, d) for d in LARGEST)
        samples = self._config.train.global_batch_size // max(1, self._cluster.devices // parts)
        key = "strategy.num_microbatches" if self._size(keys, "pipeline") > 1 else "train.grad_accumulation"
        if key in self._given or not samples:
            yield keys
            return
        for rows in _powers(min(LARGEST_ROWS, samples)):
            if samples % rows == 0:
                yield {**keys, key: samples // rows}

    def _free(self, key: str, tried: Sequence[Any]) -> list[dict[str, Any]]:
        """Return the values of a key that the strategy accepts; nothing to change if the command line gives one."""
        return [{}] if key in self._given else [{key: value} for value in tried if self._accepts(key, value)]

    def _accepts(self, key: str, value: Any) -> bool:
        try:
            self._with({key: value})
        except ValueError as e:
            self._refuse(str(e))
            return False
        return True

    def _refuse(self, reason: str) -> None:
        self.pruned[without_numbers(reason.partition(";")[0].partition("\n")[0])] += 1

    def _size(self, keys: dict[str, Any], dimension: str) -> int:
        key = f"strategy.{dimension}"
        found = keys[key] if key in keys else getattr(self._config.strategy, dimension, 1)
        return found if isinstance(found, int) else 1

    def _with(self, keys: dict[str, Any]) -> Config:
        """Return the configuration with these keys.

        Raises:
            ValueError: the strategy refuses them.
        """
        of_strategy = {k.removeprefix("strategy."): v for k, v in keys.items() if k.startswith("strategy.")}
        of_train = {k.removeprefix("train."): v for k, v in keys.items() if k.startswith("train.")}
        return replace(
            self._config,
            strategy=replace(self._config.strategy, **of_strategy),
            train=replace(self._config.train, **of_train),
        )

    def _forecast(self, config: Config, found: FoundLayout, keys: dict[str, Any]) -> Forecast:
        layout = found.layout
        mesh, options = layout.mesh, config.strategy
        rules = registry.load(options.name)
        trainer, division = rules.trainer(rules.keys(options), mesh, self._job), rules.division(options, mesh)
        samples = config.train.global_batch_size / mesh.data_parallel_size
        passes = config.train.grad_accumulation * (layout.pipeline.num_microbatches if layout.pipeline else 1)
        gathers = division is not None and division.parameters > 1
        divides_update = division is not None and division.optimizer > 1 and not gathers
        resharded = gathers and getattr(options, "reshard_after_forward", True)
        again = config.train.activation_checkpointing
        recomputes: Recomputed = "blocks" if again == "blocks" else "none"  # selective keeps less, which cannot be seen
        step = Step(
            mesh=mesh,
            rows=samples / passes,
            passes=passes,
            chunks=1 if layout.pipeline is None else layout.pipeline.num_stages // mesh.pipeline,
            bubble=0.0 if layout.pipeline is None else _bubble(layout.pipeline, mesh.pipeline),
            recompute=float(recomputes == "blocks"),
            recompute_attention=float(again != "none"),
            gathers=gathers,
            divides_update=divides_update,
            gathers_each_pass=bool(resharded),
            gathers_again=bool(resharded),
            sums_each_pass=layout.pipeline is None,
            gathered_bytes=4.0 if config.train.precision in ("fp32", "tf32") else 2.0,
            exchanged_bytes=SUMMED_BYTES + (UPDATED_BYTES if divides_update else 0.0),
            divides_sends=False,
            divides_ends=bool(self._divided(mesh.tensor)[1]),
        )
        memory: WorkerMemory | None = None
        refused = f"strategy={options.name}: what a device has of the model is not known"
        if division is not None and layout.devices_per_worker == 1:
            refused = ""
            place = (trainer, mesh.pipeline)
            if place not in self._gathered:
                self._gathered[place] = trainer.gathered_bytes(config, mesh, self._model)
            state = replace(self._state(division, mesh.tensor), gathered=self._gathered[place] / mesh.tensor)
            memory = self.traced.kept(recomputes, tensor=mesh.tensor, context=mesh.context).added(
                state, rows=step.rows, mesh=mesh, pipeline=layout.pipeline, is_gathered=gathers
            )
        changed = {key: value for key, value in keys.items() if self._value(key) != value}
        overrides = tuple(format_override(key, value) for key, value in changed.items())
        return Forecast(overrides=overrides, step=step, memory=memory, refused=refused)

    def _state_of(self, division: Division, tensor: int) -> WorkerMemory:
        """Return the training state of a worker, if ``tensor`` workers divide what they may.

        Whether they can is proven at the launch, with blocks that have memory.
        """
        inside, outside = self._divided(tensor)
        sizes = [
            replace(size, rows=math.ceil(size.rows / tensor)) if p in inside | outside else size
            for size, p in zip(self._sizes, self._model.parameters(), strict=True)
        ]
        return worker_memory(sizes, division)

    def _value(self, key: str) -> Any:
        section, _, name = key.partition(".")
        return getattr(getattr(self._config, section), name)


def best_of_each(forecasts: Sequence[Forecast]) -> list[Forecast]:
    """Return the fastest number of samples for a pass of each mesh, or the one that needs least; fastest first."""
    groups: dict[Any, list[Forecast]] = {}
    for forecast in forecasts:
        key = (forecast.mesh, forecast.step.recompute, forecast.step.chunks, forecast.step.gathers)
        groups.setdefault((*key, forecast.step.divides_update), []).append(forecast)
    found = [min(group, key=lambda f: (f.seconds, f.memory_bytes)) for group in groups.values()]
    return sorted(found, key=lambda f: (f.seconds, f.memory_bytes))


def without_numbers(reason: str) -> str:
    """Return a reason as it is for all layouts: keys without their values, and N for other numbers."""
    return re.sub(r"\b\d+\b", "N", re.sub(r"=\d+\b", "", re.sub(r"=[^:]*:", ":", reason, count=1)))


def _powers(most: int) -> tuple[int, ...]:
    return tuple(2**i for i in range(most.bit_length()))


def _bubble(layout: PipelineLayout, workers: int) -> float:
    """Return the time that a pipeline waits relative to the time that it computes, by a replay of its schedule.

    What it waits does not grow with the micro-batches, of which two for each stage are replayed, and is in proportion
    to the workers after the first.
    """
    stages, replayed = layout.num_stages // workers, min(workers, REPLAYED)
    microbatches = min(layout.num_microbatches, 2 * stages * replayed)
    waits = _waits(layout.schedule, replayed, microbatches, stages) * (workers - 1) / (replayed - 1)
    return waits / layout.num_microbatches


@functools.cache
def _waits(schedule: str, workers: int, microbatches: int, stages: int) -> float:
    """Return how many passes of a micro-batch through a worker's stages the busiest one waits."""
    spans = simulate(computations(schedule, workers, microbatches, stages))
    busy = max(busy_s(worker) for worker in spans)
    return (extent_s(spans) - busy) / (stages * (UNIT_TIMES["F"] + UNIT_TIMES["B"]))

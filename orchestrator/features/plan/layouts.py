"""The layouts that a job may have on a cluster, each checked and measured for memory."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

from orchestrator.config.build import ConfigError
from orchestrator.config.schema import Config
from orchestrator.config.text import format_override
from orchestrator.features.plan.model_work import UNFUSED
from orchestrator.features.plan.prediction.calibration import Case, shares_of_job
from orchestrator.features.plan.prediction.cost import Stack
from orchestrator.features.plan.prediction.devices import CPU, Cluster
from orchestrator.features.plan.prediction.forecast import Forecast
from orchestrator.features.plan.prediction.work import ModelWork
from orchestrator.features.plan.traced_job import TracedJob
from orchestrator.planning.layout import Layout
from orchestrator.planning.memory import GIB
from orchestrator.planning.plan import Node, find_layout
from orchestrator.planning.schedules import divisors
from orchestrator.strategies import registry

LARGEST = {"pipeline": 64, "tensor": 8, "context": 8}
"""The largest sizes of dimensions that are tried."""
LEAST_TOKENS = 4096
"""The tokens of a sample that a device has at least if others have the rest."""
SCHEDULES = ("1F1B", "Interleaved1F1B")
LARGEST_ROWS = 64


class Layouts:
    """The layouts of a job.

    Attributes:
        pruned: how many sizes and layouts the product refuses, by reason.
    """

    def __init__(
        self,
        config: Config,
        job: TracedJob,
        workers: int,
        nodes: tuple[Node, ...],
        given: Collection[str],
        *,
        schedules: Sequence[str] = SCHEDULES,
        oversubscribe_cpus: bool = False,
    ):
        """Prepare a search.

        Args:
            config: the configuration of a launch.
            job: its job.
            workers: how many there are.
            nodes: where they would be.
            given: the keys that stay as they are.
            schedules: those of pipelines that are tried.
            oversubscribe_cpus: see :func:`~orchestrator.planning.plan.make_plan`.
        """
        self._config, self._job, self._given = config, job, given
        self._workers, self._nodes, self._schedules = workers, nodes, schedules
        self._oversubscribe_cpus = oversubscribe_cpus
        self.pruned: Counter[str] = Counter()

    @classmethod
    def elsewhere(cls, config: Config, job: TracedJob, cluster: Cluster, given: Collection[str]) -> Layouts:
        """Prepare a search on a cluster that is not here."""
        workers = config.strategy.num_workers
        memory = int(cluster.device.memory_gib * GIB)
        # What nodes decide differs from strategy to strategy; for a mesh, it is only how many devices there are.
        merged = config.strategy.name == "mesh"
        nodes, devices = (1, cluster.devices) if merged else (cluster.nodes, cluster.per_node)
        each = config.cluster.cpus_per_worker
        found = tuple(
            Node(
                node_id=str(i),
                name=f"node{i}",
                cpus=devices * each,
                gpus=0 if cluster.name == CPU else devices,
                memory_bytes=devices * memory,
                gpu_memory_bytes=memory,
            )
            for i in range(nodes)
        )
        return cls(config, job, workers if isinstance(workers, int) else cluster.devices, found, given)

    def as_configured(self) -> Forecast:
        """Return the layout that the configuration names, without its time.

        Raises:
            ConfigError: the product refuses it.
        """
        return self._job.forecast(self._config, self._layout(self._config))

    def forecasts(self) -> Iterator[Forecast]:
        """Yield every layout that the product does not refuse, without its time."""
        recomputes = self._free("train.activation_checkpointing", ("none", "blocks"))
        for keys in (keys for of_mesh in self._meshes() for keys in self._passes(of_mesh)):
            try:
                layout = self._layout(self._with(keys))
            except (ConfigError, ValueError) as e:
                self._refuse(str(e))
                continue
            for all_keys in ({**keys, **recompute} for recompute in recomputes):
                changed = {key: value for key, value in all_keys.items() if self._value(key) != value}
                overrides = [format_override(key, value) for key, value in changed.items()]
                yield self._job.forecast(self._with(all_keys), layout, overrides)

    def _layout(self, config: Config) -> Layout:
        rules = registry.load(config.strategy.name)
        return find_layout(config, rules, self._nodes, oversubscribe_cpus=self._oversubscribe_cpus).layout

    def _meshes(self) -> Iterator[dict[str, Any]]:
        devices, layers = self._workers, self._job.work.layers
        if self._config.strategy.name != "mesh":
            yield {}
            return
        most_stages = min(LARGEST["pipeline"], layers)
        cuts = [
            {**tensor, **context, **pipeline}
            for tensor in self._free("strategy.tensor", self._tensor_sizes())
            for context in self._free("strategy.context", self._context_sizes())
            for pipeline in self._free("strategy.pipeline", _sizes(devices, most_stages))
        ]
        for cut in cuts:
            rest, beyond = divmod(devices, math.prod(self._size(cut, d) for d in LARGEST))
            schedules = self._free("strategy.schedule", self._schedules) if self._size(cut, "pipeline") > 1 else [{}]
            for shard in self._free("strategy.shard", _sizes(rest, rest)):
                if beyond or rest % self._size(shard, "shard"):
                    continue
                divides = self._size(shard, "shard") * self._size(cut, "context") > 1
                for optimizer in self._free("strategy.shard_optimizer", (False, True)) if divides else [{}]:
                    yield from ({**cut, **shard, **optimizer, **schedule} for schedule in schedules)

    def _tensor_sizes(self) -> list[int]:
        """Return powers of two, and what divides the matrices of all blocks evenly; 1 if there are none."""
        width = self._job.block_width
        if not width:
            return [1]
        sizes = _sizes(self._workers, LARGEST["tensor"])
        return [size for size in sizes if size.bit_count() == 1 or width % size == 0]

    def _context_sizes(self) -> list[int]:
        tokens = self._job.work.tokens
        fitting = (size for size in _sizes(self._workers, LARGEST["context"]) if tokens % (2 * size) == 0)
        return [size for size in fitting if tokens >= size * LEAST_TOKENS] or [1]

    def _passes(self, keys: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the keys with each number of samples that a pass may have."""
        parts = math.prod(self._size(keys, d) for d in LARGEST)
        samples = self._config.train.global_batch_size // max(1, self._workers // parts)
        key = "strategy.num_microbatches" if self._size(keys, "pipeline") > 1 else "train.grad_accumulation"
        if key in self._given or not samples:
            yield keys
            return
        for rows in _sizes(samples, LARGEST_ROWS):
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


def usual_stack(cluster: Cluster, config: Config, work: ModelWork) -> tuple[Stack, Case]:
    """Return the shares without a run of the user, and what is known by which they were found."""
    stack: Stack = UNFUSED
    case: Case = "all new"
    if cluster.name != CPU:
        compiled = config.train.compile is not False
        found = shares_of_job(cluster.name, compiled=compiled, sparse=work.layer.experts > 0)
        stack, case = found.stack, found.case
    stack = replace(stack, operator_s=cluster.device.operator_us / 1e6)
    share = cluster.device.reached or stack.products
    return replace(stack, products=share, attention=share * stack.attention / stack.products), case


def without_numbers(reason: str) -> str:
    """Return a reason as it is for all layouts: keys without their values, and N for other numbers."""
    return re.sub(r"\b\d+\b", "N", re.sub(r"=\d+\b", "", re.sub(r"=[^:]*:", ":", reason, count=1)))


def _sizes(whole: int, most: int) -> tuple[int, ...]:
    """Return the sizes up to ``most`` into which a number can be divided."""
    return tuple(size for size in divisors(whole) if size <= most)

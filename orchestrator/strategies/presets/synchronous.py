"""A synchronous strategy: a name, its keys, and the mesh that they make. What trains follows from the mesh.

Passes go through the whole model, through modules that are gathered, or through stages. Gradients are summed in the
buckets of ``DistributedDataParallel``, into shards, or after the last backward pass. Parameters are divided, or the
optimizer's state alone.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from orchestrator.config.schema import Config, StrategyConfig, TrainConfig
from orchestrator.config.text import to_cli
from orchestrator.job import Job, has_training_step
from orchestrator.planning.layout import Keys, Layout
from orchestrator.planning.memory import Division
from orchestrator.planning.mesh import Mesh
from orchestrator.planning.plan import Plan
from orchestrator.strategies.base import Strategy
from orchestrator.strategies.constructor import Outline
from orchestrator.strategies.keys import PipelinedConfig, ReplicatedConfig, ShardedConfig, StagedConfig, TensorConfig
from orchestrator.strategies.parts.stage_layout import reshard_errors, staged
from orchestrator.strategies.rules import Rules
from orchestrator.strategies.slots import slots_of

if TYPE_CHECKING:
    from orchestrator.strategies.transforms.part import Part

_MOST_REPLICAS = 16
"""The replicas, or the stages, up to which a mesh on CPUs is looked for."""


class Synchronous(Rules[Keys]):
    """The rules that all products have."""

    @classmethod
    @abc.abstractmethod
    def mesh(cls, options: Keys, num_workers: int, errors: list[str]) -> Mesh:
        """Return the mesh of so many workers; append an error to ``errors`` if the keys do not make it."""

    fewest_replicas: ClassVar[int] = 1
    """The least number of replicas that the strategy is chosen for."""

    @classmethod
    def default_num_workers(cls, options: Keys, *, gpus: Sequence[int], spares: int) -> int:
        """Return what fits on the GPUs; on CPUs, the fewest workers of the mesh that the keys ask for, at least two."""
        size = cls.replica_size(options)
        if gpus:
            return super().default_num_workers(options, gpus=gpus, spares=spares)
        sizes = range(cls.fewest_replicas * size, _MOST_REPLICAS * size + 1, size)
        return next((n for n in sizes if n > 1 and cls._is_asked_for(options, n)), 2 * size)

    @classmethod
    def _is_asked_for(cls, options: Keys, num_workers: int) -> bool:
        errors = list[str]()
        mesh = cls.mesh(options, num_workers, errors)
        return not errors and (mesh.num_shards > 1 or not slots_of(options, mesh).divides_optimizer)

    @classmethod
    def plan_layout(cls, options: Keys, train: TrainConfig, num_workers: int, errors: list[str]) -> Layout:
        keys: StrategyConfig = options  # which may have those of several classes
        before = len(errors)
        mesh = cls.mesh(options, num_workers, errors)
        valid_mesh = len(errors) == before
        if valid_mesh:
            errors += _unused_keys(keys, mesh)
        errors += [error for part in _transforms(keys) for error in part.layout_errors(keys, mesh)]
        if mesh.pipeline == 1 or not isinstance(keys, StagedConfig):
            return Layout(mesh=mesh)
        if slots_of(keys, mesh).gathers and isinstance(keys, ShardedConfig) and isinstance(keys, PipelinedConfig):
            errors += reshard_errors(keys.schedule) if keys.reshard_after_forward else []
        return staged(keys, train, mesh, errors, valid_mesh=valid_mesh)

    @classmethod
    def division(cls, options: Keys, mesh: Mesh) -> Division:
        slots = slots_of(options, mesh)
        if not slots.gathers:
            return Division(optimizer=mesh.num_shards if slots.divides_optimizer else 1, stages=mesh.pipeline)
        return dataclasses.replace(
            Division.of(mesh),
            gradients=mesh.num_shards if mesh.pipeline == 1 else 1,  # a stage sums them after its last backward pass
            on_host=isinstance(options, ShardedConfig) and options.offloads,
        )

    @classmethod
    def trainer(cls, options: Keys, mesh: Mesh, job: Job) -> type[Strategy]:
        # Imported here, because only one of them is needed, and each imports another part of torch.
        if slots_of(options, mesh).has_buckets:
            if has_training_step(job):
                from orchestrator.strategies.replicated.job_step import JobStep

                return JobStep
            if not isinstance(options, ReplicatedConfig):
                from orchestrator.strategies.trainer import Trainer

                return Trainer
        from orchestrator.strategies.mesh_trainer import MeshTrainer

        return MeshTrainer

    @classmethod
    def check_job(cls, config: Config, outline: Outline, plan: Plan, errors: list[str]) -> tuple[str, ...]:
        trainer = cls.trainer(cls.keys(config.strategy), plan.mesh, outline.job)
        if trainer.runs_training_step or config.strategy.name == "single":
            return trainer.check_job(config, outline, plan, errors)
        from orchestrator.strategies.checks.mesh_checks import check_mesh

        return check_mesh(config, outline, plan, errors)

    @classmethod
    def moves_parameters(cls, options: Keys, mesh: Mesh, job: Job) -> bool:
        return slots_of(options, mesh).moves_parameters


def _transforms(options: StrategyConfig) -> Sequence[type[Part]]:
    """Return the dimensions along which workers may compute the same samples, which few strategies have to load."""
    if not isinstance(options, TensorConfig):
        return ()
    from orchestrator.strategies.transforms.every import TRANSFORMS

    return TRANSFORMS


def _unused_keys(options: StrategyConfig, mesh: Mesh) -> list[str]:
    """Return an error for each key that is set and would have no effect in this mesh."""
    reasons: dict[str, Mapping[str, object]] = {}
    if mesh.pipeline == 1:
        of_stages = {"num_microbatches": "auto", "stages_per_rank": "auto", "split": "auto"}
        reasons["strategy.pipeline=1 has no stages"] = of_stages
    for part in _transforms(options):
        reasons |= part.unused_keys(mesh)
    slots = slots_of(options, mesh)
    if not slots.has_buckets:
        of_buckets = {"bucket_mb": "auto", "comm_hook": "none", "find_unused_parameters": False, "static_graph": False}
        reasons["only whole models on each worker have it"] = {**of_buckets, "sync_batchnorm": False}
    if isinstance(options, ReplicatedConfig) and not slots.gathers:
        of_shards = {"wrap": "auto", "reshard_after_forward": True, "prefetch": 1}
        reasons["nothing is gathered without shards of parameters"] = of_shards
    return [
        f"strategy.{key}={to_cli(value)}: {reason}; set it to {to_cli(unset)}"
        for reason, keys in reasons.items()
        for key, unset in keys.items()
        if (value := getattr(options, key, unset)) != unset
    ]

"""Products of dimensions. A preset is the name of one, and a file of its values; what trains follows from the mesh.

Passes go through the whole model, through modules that are gathered, or through stages. Gradients are summed in the
buckets of ``DistributedDataParallel``, into shards, or after the last backward pass. Parameters are divided, or the
optimizer's state alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn

from orchestrator.config.files import preset_values
from orchestrator.config.schema import Config, TrainConfig
from orchestrator.config.text import to_cli
from orchestrator.job import Job, has_training_step
from orchestrator.planning.layout import Layout
from orchestrator.planning.memory import Division
from orchestrator.planning.mesh import DIMENSIONS, Mesh
from orchestrator.planning.plan import Plan
from orchestrator.planning.schedules import SCHEDULES, PipelineLayout
from orchestrator.strategies.base import Strategy
from orchestrator.strategies.constructor import Outline
from orchestrator.strategies.keys import MeshConfig
from orchestrator.strategies.parts.stage_layout import at_other_size, reshard_errors, staged
from orchestrator.strategies.registry import register
from orchestrator.strategies.rules import Rules
from orchestrator.strategies.slots import Slots, slots_of

if TYPE_CHECKING:
    from orchestrator.strategies.transforms.part import Part

LEAST_SIZE = 2
"""The least number of workers that a tensor is divided over in ``hsdp``."""
_MOST_REPLICAS = 16
"""The replicas, or the stages, up to which a mesh on CPUs is looked for."""


@register("single", "ddp", "fsdp", "model_parallel", "pipeline", "ddp_pipeline", "fsdp_pipeline")
class Product(Rules[MeshConfig]):
    """One size, which is ``fixed`` to auto, is what the others leave of the workers."""

    @classmethod
    def mesh(cls, options: MeshConfig, num_workers: int, errors: list[str]) -> Mesh:
        """Return the mesh of so many workers; append an error to ``errors`` if the keys do not make it."""
        others, rest = divmod(num_workers, options.known_size)
        if rest:
            known = [dimension for dimension, size in options.sizes.items() if size not in (1, "auto")]
            fitting = " or ".join(str(n * options.known_size) for n in (others, others + 1) if n)
            by = " x ".join(map(options.typed, known))
            errors.append(f"strategy.num_workers={num_workers}: not divisible by {by}; set it to {fitting}")
        sizes = {dimension: max(1, others) if size == "auto" else size for dimension, size in options.sizes.items()}
        mesh = Mesh(**sizes, replicas_close=options.close == "replicas")
        if (reason := _too_few(options, num_workers, mesh, divides=not rest)) is not None:
            errors.append(f"strategy.num_workers={num_workers}: {reason}")
        return mesh

    @classmethod
    def replica_size(cls, options: MeshConfig) -> int:
        return 1 if options.pipeline == "auto" else options.known_size

    @classmethod
    def default_num_workers(cls, options: MeshConfig, *, gpus: Sequence[int], spares: int) -> int:
        """Return what fits on the GPUs; on CPUs, the fewest workers of the mesh that the keys ask for, at least two."""
        if "auto" not in options.sizes.values():
            return options.known_size
        size = cls.replica_size(options)
        if gpus:
            return super().default_num_workers(options, gpus=gpus, spares=spares)
        fewest = 2 if options.name == "ddp_pipeline" else 1
        sizes = range(fewest * size, _MOST_REPLICAS * size + 1, size)
        return next((n for n in sizes if n > 1 and cls._is_asked_for(options, n)), 2 * size)

    @classmethod
    def _is_asked_for(cls, options: MeshConfig, num_workers: int) -> bool:
        errors = list[str]()
        mesh = cls.mesh(options, num_workers, errors)
        return not errors and (mesh.num_shards > 1 or not options.shard_optimizer)

    @classmethod
    def plan_layout(cls, options: MeshConfig, train: TrainConfig, num_workers: int, errors: list[str]) -> Layout:
        before = len(errors)
        mesh = cls.mesh(options, num_workers, errors)
        valid_mesh = len(errors) == before
        if valid_mesh:
            errors += _unused_keys(options, mesh)
        errors += [error for part in _transforms(options) for error in part.layout_errors(options, mesh)]
        if mesh.pipeline == 1:
            return Layout(mesh=mesh)
        if slots_of(options, mesh).gathers and options.reshard_after_forward:
            errors += reshard_errors(options.schedule)
        layout = staged(options, train, mesh, errors, valid_mesh=valid_mesh)
        if not options.opens("close"):
            return layout
        close = "stages of a pipeline" if options.close == "stages" else "replicas of a stage"
        note = f"placement: the {close} share a node where there is room; a note at the start names the others"
        return replace(layout, notes=(note,))

    @classmethod
    def resized(
        cls, options: MeshConfig, num_workers: int, *, mesh: Mesh, pipeline: PipelineLayout | None
    ) -> MeshConfig | None:
        """Keep the stages of pipelines, of which a run loses and gains whole ones."""
        of_size = replace(options, num_workers=num_workers)
        if pipeline is None or options.replicate != "auto":
            return of_size
        return at_other_size(of_size, mesh, pipeline, replicas=max(1, num_workers // cls.replica_size(options)))

    @classmethod
    def division(cls, options: MeshConfig, mesh: Mesh) -> Division:
        slots = slots_of(options, mesh)
        if not slots.gathers:
            return Division(optimizer=mesh.num_shards if slots.divides_optimizer else 1, stages=mesh.pipeline)
        return replace(
            Division.of(mesh),
            gradients=mesh.num_shards if mesh.pipeline == 1 else 1,  # a stage sums them after its last backward pass
            on_host=options.cpu_offload,
        )

    @classmethod
    def trainer(cls, options: MeshConfig, mesh: Mesh, job: Job) -> type[Strategy]:
        # Imported here, because only one of them is needed, and each imports another part of torch.
        if slots_of(options, mesh).has_buckets:
            if has_training_step(job):
                from orchestrator.strategies.replicated.job_step import JobStep

                return JobStep
            if options.name == "single":
                from orchestrator.strategies.trainer import Trainer

                return Trainer
        from orchestrator.strategies.mesh_trainer import MeshTrainer

        return MeshTrainer

    @classmethod
    def why_not_compiled(cls, plan: Plan) -> str | None:
        if plan.pipeline is None or not SCHEDULES[plan.pipeline.schedule].splits_backward:
            return None
        name = plan.pipeline.schedule
        return f"{name} computes backward passes in halves, and compiled code cannot; use strategy.schedule=1F1B"

    @classmethod
    def gathered_bytes(cls, config: Config, mesh: Mesh, model: nn.Module) -> float:
        from orchestrator.strategies.parts.shard_options import gathered_at_once

        return gathered_at_once(config, mesh, model) if slots_of(config.strategy, mesh).gathers else 0.0

    @classmethod
    def check_job(cls, config: Config, outline: Outline, plan: Plan, errors: list[str]) -> tuple[str, ...]:
        trainer = cls.trainer(cls.keys(config.strategy), plan.mesh, outline.job)
        from orchestrator.strategies.checks.mesh_checks import check_mesh, check_whole

        is_whole = trainer.traits.runs_training_step or config.strategy.name == "single"
        return (check_whole if is_whole else check_mesh)(config, outline, plan, errors)

    @classmethod
    def moves_parameters(cls, options: MeshConfig, mesh: Mesh, job: Job) -> bool:
        return slots_of(options, mesh).moves_parameters


@register("hsdp")
class ShardsOfReplicas(Product):
    """A shard of each tensor of one of the replicas of the model on every worker.

    A replica divides the tensors of the model over its workers. After the backward passes of a step, the gradients of
    each shard are summed over its replicas. A lost worker is replaced from a replica of its shard.
    """

    @classmethod
    def mesh(cls, options: MeshConfig, num_workers: int, errors: list[str]) -> Mesh:
        fixed = options if options.shard != "auto" else replace(options, shard=LEAST_SIZE)
        before, size = len(errors), fixed.known_size
        Product.mesh(replace(options, shard=1), num_workers, errors)
        replicas, rest = divmod(num_workers, size)
        if len(errors) == before and (rest or replicas < 2):
            nearest = [str(number * size) for number in (replicas, replicas + 1) if number >= 2] or [str(2 * size)]
            by = " x ".join(filter(None, (fixed.typed("shard"), options.group_keys)))
            reason = f"not divisible by {by}" if rest else "makes no replicas of the shards"
            if options.shard == "auto":
                reason = "cannot be divided into replicas of two or more workers"
            errors.append(
                f"strategy.num_workers={num_workers}: {reason}; set it to {' or '.join(nearest)}, or use strategy=fsdp "
                "or strategy=ddp, which take any number of workers"
            )
        return Product.mesh(fixed, num_workers, [])

    @classmethod
    def replica_size(cls, options: MeshConfig) -> int:
        return (LEAST_SIZE if options.shard == "auto" else 1) * options.known_size

    @classmethod
    def default_num_workers(cls, options: MeshConfig, *, gpus: Sequence[int], spares: int) -> int:
        if options.shard == "auto":
            for shards in range(max(gpus, default=0) // options.group_size, 1, -1):
                size = shards * options.group_size
                replicas = min(_replicas_in_nodes(size, gpus), (sum(gpus) - spares) // size)
                if replicas >= 2:
                    return replicas * size
        return super().default_num_workers(options, gpus=gpus, spares=spares)

    @classmethod
    def on_nodes(
        cls, options: MeshConfig, num_workers: int, *, workers_per_node: Sequence[int]
    ) -> tuple[MeshConfig, tuple[str, ...]]:
        requested, typed = options.shard, options.typed("shard")
        num_workers, per_node = num_workers // options.group_size, [n // options.group_size for n in workers_per_node]
        sizes = [size for size in range(num_workers // 2, 1, -1) if num_workers % size == 0]
        best = next((size for size in sizes if _replicas_in_nodes(size, per_node) * size >= num_workers), None)
        if requested == "auto":
            if not sizes:
                return options, ()
            chosen = best or sizes[0]
            note = f"{typed}: {chosen}, {_place(num_workers // chosen, best, num_workers, per_node)}"
            return replace(options, shard=chosen), (note,)
        if requested not in sizes or best is None or _replicas_in_nodes(requested, per_node) * requested >= num_workers:
            return options, ()
        return options, (
            f"{typed}: parameters go through the network, because not every replica has room on one node; "
            f"{replace(options, shard=best).typed('shard')} keeps each on one",
        )

    @classmethod
    def resized(
        cls, options: MeshConfig, num_workers: int, *, mesh: Mesh, pipeline: PipelineLayout | None
    ) -> MeshConfig | None:
        """Keep the shards: a run loses and gains whole replicas."""
        return replace(options, num_workers=num_workers, shard=mesh.shard)


@register("mesh")
class AnyProduct(Product):
    """Any product of stages, replicas, shards, parts of samples and parts of layers."""

    @classmethod
    def mesh(cls, options: MeshConfig, num_workers: int, errors: list[str]) -> Mesh:
        before, others = len(errors), num_workers // options.known_size
        automatic = "auto" in options.sizes.values()
        if num_workers % options.known_size or others == 0 or (not automatic and others > 1):
            known = [options.typed(name) for name, size in options.sizes.items() if size not in (1, "auto")]
            nearest = [str(n * options.known_size) for n in (others, others + 1) if n] if automatic else []
            errors.append(
                f"strategy.num_workers={num_workers}: {' x '.join(known) or 'every size 1'} makes "
                f"{options.known_size}; set it to "
                f"{' or '.join(nearest) or f'{options.known_size}, or one size to auto'}"
            )
        mesh = Product.mesh(options, num_workers, [])
        if mesh.num_shards == 1 and options.shard_optimizer and len(errors) == before:
            errors.append(
                "strategy.shard_optimizer=true: strategy.shard=1 divides nothing; set strategy.shard to the number of "
                "workers over which the optimizer's state is divided"
            )
        return replace(mesh, replicas_close=mesh.shard > 1 and mesh.replicate == 1)

    @classmethod
    def replica_size(cls, options: MeshConfig) -> int:
        return options.known_size

    @classmethod
    def _is_asked_for(cls, options: MeshConfig, num_workers: int) -> bool:
        asked = [name for name, size in options.sizes.items() if size == "auto" and name != "replicate"]
        mesh = cls.mesh(options, num_workers, [])
        return super()._is_asked_for(options, num_workers) and all(getattr(mesh, name) > 1 for name in asked)

    @classmethod
    def resized(
        cls, options: MeshConfig, num_workers: int, *, mesh: Mesh, pipeline: PipelineLayout | None
    ) -> MeshConfig | None:
        """Keep the parts, so that a run loses and gains whole replicas. Without replicas, divide the model again."""
        if "auto" in (options.shard, options.pipeline) and mesh.replicate == 1:
            return replace(options, num_workers=num_workers)
        replicas, rest = divmod(num_workers, mesh.num_workers // mesh.replicate)
        if rest or not replicas:
            return None
        of_size = replace(
            options, num_workers=num_workers, pipeline=mesh.pipeline, shard=mesh.shard, replicate=replicas
        )
        return of_size if pipeline is None else at_other_size(of_size, mesh, pipeline, replicas=replicas)


def _too_few(options: MeshConfig, num_workers: int, mesh: Mesh, *, divides: bool) -> str | None:
    """Return why so few workers leave nothing to divide, and what to do; None if they do not."""
    name, more = options.name, f"set it to {2 * options.known_size} or more"
    if options.pipeline == "auto" and num_workers < 2:
        return f"strategy={name} needs at least 2, one per stage; use strategy=single for one"
    if options.pipeline == "auto" and mesh.pipeline < 2:
        return f"{options.group_keys} leaves one stage; {more}, or use strategy=fsdp"
    if options.shard == "auto" and num_workers < 2 and not options.opens("pipeline"):
        return f"strategy={name} divides the model over at least 2 workers; use strategy=single for one"
    if options.shard != "auto" or mesh.num_shards > 1:
        return None
    if options.opens("pipeline"):
        alone = f"leaves one worker for each stage, which has nothing to divide; {more}, or use strategy=pipeline"
        return alone if divides else None
    return f"{options.group_keys} leaves nothing to divide over; {more}, or use strategy=ddp"


def _replicas_in_nodes(size: int, per_node: Sequence[int]) -> int:
    """Return how many replicas of ``size`` workers the nodes have room for, each inside one node."""
    return sum(workers // size for workers in per_node)


def _place(replicas: int, best: int | None, num_workers: int, per_node: Sequence[int]) -> str:
    """Return where the replicas are, and what that means; ``best`` is None if they cross nodes."""
    if best is None:
        return f"{replicas} replicas, some of which cross nodes, because no size fits"
    if max(per_node) < num_workers:
        return f"{replicas} replicas, each on one node"
    return f"{replicas} replicas on one node, where strategy=fsdp takes less memory for each worker"


def _transforms(options: MeshConfig) -> Sequence[type[Part]]:
    """Return the dimensions along which workers may compute the same samples, which ``single`` has no need to load."""
    if options.name == "single":
        return ()
    from orchestrator.strategies.transforms.every import TRANSFORMS

    return TRANSFORMS


def _division(mesh: Mesh, slots: Slots) -> str:
    """Return the sizes, as they are typed, that divide the model or its samples over workers."""
    dividing = [name for name in DIMENSIONS if name != "replicate" and (name != "shard" or slots.gathers)]
    return " and ".join(f"strategy.{name}={mesh.size(name)}" for name in dividing if mesh.size(name) > 1)


def _unused_keys(options: MeshConfig, mesh: Mesh) -> list[str]:
    """Return an error for each key that is set and would have no effect in this mesh."""
    reasons = dict[str, Sequence[str]]()
    if mesh.pipeline == 1:
        reasons["strategy.pipeline=1 has no stages"] = ("num_microbatches", "stages_per_rank", "split")
    for part in _transforms(options):
        reasons |= part.unused_keys(mesh)
    slots = slots_of(options, mesh)
    if not slots.has_buckets:
        of_buckets = ("bucket_mb", "comm_hook", "find_unused_parameters", "static_graph", "sync_batchnorm")
        reasons[f"has no effect with {_division(mesh, slots)}"] = of_buckets
    if not slots.gathers:
        reasons["nothing is gathered without shards of parameters"] = ("wrap", "reshard_after_forward", "prefetch")
    neutral = preset_values("mesh")
    return [
        f"strategy.{key}={to_cli(getattr(options, key))}: {reason}; set it to {to_cli(neutral[key])}"
        for reason, keys in reasons.items()
        for key in keys
        if options.opens(key) and getattr(options, key) != neutral[key]
    ]

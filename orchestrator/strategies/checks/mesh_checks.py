"""Whether a job can be trained on a mesh, on the driver and with fake tensors."""

from __future__ import annotations

from orchestrator.config.schema import Config
from orchestrator.planning.plan import Plan
from orchestrator.planning.schedules import SCHEDULES
from orchestrator.strategies.checks.optimizer_shards import check_optimizer_shards
from orchestrator.strategies.checks.stage_checks import check_stages
from orchestrator.strategies.constructor import Outline, diverging_errors
from orchestrator.strategies.keys import MeshConfig
from orchestrator.strategies.parts.shard_options import check_shards, part_errors
from orchestrator.strategies.replicated.ddp_options import bucket_notes
from orchestrator.strategies.slots import Slots, slots_of
from orchestrator.strategies.trainer import Trainer
from orchestrator.strategies.transforms.every import check_parts, divides_layers, outline_of_parts


def check_mesh(config: Config, outline: Outline, plan: Plan, errors: list[str]) -> tuple[str, ...]:
    """Check what a mesh demands of the job; see :meth:`~orchestrator.strategies.base.Strategy.check_job`."""
    slots = slots_of(config.strategy, plan.mesh)
    if slots.stages:
        return _check_stages(config, outline, plan, slots, errors)
    notes = Trainer.check_job(config, outline, plan, errors)
    if slots.gathers:
        notes = (*notes, *check_shards(config, outline, plan, errors))
    elif slots.together:
        errors += part_errors(config, outline)
    notes = (*notes, *check_parts(config, outline, plan, errors))
    if slots.divides_optimizer:
        notes = (*notes, *check_optimizer_shards(outline_of_parts(outline, plan.mesh), plan, errors))
    if slots.has_buckets:
        notes = (*notes, *bucket_notes(MeshConfig.of(config.strategy), outline.model, plan))
    return notes


def _check_stages(config: Config, outline: Outline, plan: Plan, slots: Slots, errors: list[str]) -> tuple[str, ...]:
    assert plan.pipeline is not None
    schedule, before = SCHEDULES[plan.pipeline.schedule], len(errors)
    if config.train.activation_checkpointing == "selective" and schedule.splits_backward:
        errors.append(
            f"train.activation_checkpointing=selective: {schedule.name} computes backward passes in halves, and "
            "what is kept serves only one; set it to blocks, or use strategy.schedule=1F1B"
        )
    errors += diverging_errors(outline.model, plan)
    if divides_layers(plan.mesh) and plan.mesh.shard == 1:
        errors += part_errors(config, outline)
    notes = (*check_stages(config, outline, plan, errors), *check_parts(config, outline, plan, errors))
    if len(errors) == before:  # without the notes, which are on whole models
        if slots.gathers:
            check_shards(config, outline, plan, errors)
        if slots.divides_optimizer:
            check_optimizer_shards(outline, plan, errors)
    return notes

"""Whether a job can be trained on a mesh, on the driver and with fake tensors."""

from __future__ import annotations

import math

from orchestrator.config.schema import Config
from orchestrator.config.text import first_few
from orchestrator.planning.plan import Plan
from orchestrator.planning.schedules import SCHEDULES
from orchestrator.strategies.checks.stage_checks import check_stages
from orchestrator.strategies.constructor import Outline, diverging_errors
from orchestrator.strategies.keys import MeshConfig
from orchestrator.strategies.owner import cut_evenly
from orchestrator.strategies.parts.shard_options import check_shards, part_errors
from orchestrator.strategies.replicated.ddp_options import bucket_notes, option_errors
from orchestrator.strategies.replicated.sync_batchnorm import check_batchnorm
from orchestrator.strategies.slots import Slots, slots_of
from orchestrator.strategies.transforms.every import check_parts, divides_layers, outline_of_parts
from orchestrator.strategies.update.job_optimizer import sparse_parameters


def check_whole(config: Config, outline: Outline, plan: Plan, errors: list[str]) -> tuple[str, ...]:
    """Check what parts of a batch demand of a model that workers have whole."""
    options, synchronized = config.strategy, False
    if isinstance(options, MeshConfig) and options.opens("bucket_mb"):
        errors += option_errors(options, config.train, outline.job, plan)
        synchronized = options.sync_batchnorm
    errors += diverging_errors(outline.model, plan)
    return check_batchnorm(outline.model, plan, synchronized=synchronized, errors=errors)


def check_mesh(config: Config, outline: Outline, plan: Plan, errors: list[str]) -> tuple[str, ...]:
    """Check what a mesh demands of the job; see :meth:`~orchestrator.strategies.rules.Rules.check_job`."""
    slots = slots_of(config.strategy, plan.mesh)
    if slots.stages:
        return _check_stages(config, outline, plan, slots, errors)
    notes = check_whole(config, outline, plan, errors)
    if slots.gathers:
        notes = (*notes, *check_shards(config, outline, plan, errors))
    elif slots.together:
        errors += part_errors(config, outline)
    notes = (*notes, *check_parts(config, outline, plan, errors))
    if slots.divides_optimizer:
        notes = (*notes, *_check_optimizer_shards(outline_of_parts(outline, plan.mesh), plan, errors))
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
            _check_optimizer_shards(outline, plan, errors)
    return notes


def _check_optimizer_shards(outline: Outline, plan: Plan, errors: list[str]) -> tuple[str, ...]:
    """Check that the optimizer's state can be divided as planned, with fake tensors.

    Args:
        outline: the job and its model.
        plan: the plan of the run.
        errors: receives a line for each reason why the state cannot be divided.

    Returns:
        Notes for the user, printed with the plan.
    """
    key, model = "strategy.shard_optimizer=true", outline.whole.model
    sparse = {*sparse_parameters([model])}
    if tables := [name for name, parameter in model.named_parameters() if parameter in sparse]:
        errors.append(
            f"{key}: {first_few(tables, 2)} have sparse gradients, which cannot be divided; give the embedding "
            "sparse=False, or set it to false"
        )
    if errors:
        return ()
    count = plan.mesh.num_shards
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    cuts = cut_evenly(shapes, count)
    held = [
        sum(math.prod(cut.box(shapes[name], index=rank, count=count).shape) for name, cut in cuts.items())
        for rank in range(count)
    ]
    return (
        f"{key}: each worker updates at most {max(held):,} of {sum(held):,} elements of parameters, and keeps the "
        "optimizer's state of these",
    )

"""The context that a strategy gets in a generation, and the seed of each step."""

from __future__ import annotations

import torch

from orchestrator.compat.generators import derived_seed, seed_generators
from orchestrator.protocol.messages import Assignment
from orchestrator.strategies.base import Context


def context_of(assignment: Assignment, device: torch.device) -> Context:
    """Return what a strategy knows about its rank in a generation."""
    config, plan = assignment.config, assignment.plan
    return Context(
        mesh=plan.mesh,
        global_rank=assignment.global_rank,
        device=device,
        seed=config.seed,
        train=config.train,
        options=config.strategy,
        collective_timeout_s=config.cluster.collective_timeout_s,
        pipeline=plan.pipeline,
        num_devices=plan.devices_per_worker,
        peer_copy_every=config.recovery.peer_copy_every,
        only_trained=config.checkpoint.only_trained,
    )


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed Python, NumPy and torch from (seed, step, rank), so that random operations repeat after a resume."""
    seed_generators(derived_seed(seed, step, rank))

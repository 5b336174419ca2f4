"""The context that a strategy gets in a generation, and the seed of each step."""

from __future__ import annotations

import torch

from orchestrator.compat.generators import seed_generators
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
    mixed = (seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + rank * 0x94D049BB133111EB) & ((1 << 63) - 1)
    seed_generators(mixed)

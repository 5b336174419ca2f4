"""Whether the optimizer's state can be divided over workers that have whole parameters."""

from __future__ import annotations

import math

from orchestrator.config.text import first_few
from orchestrator.planning.plan import Plan
from orchestrator.strategies.constructor import Outline
from orchestrator.strategies.owner import cut_evenly
from orchestrator.strategies.update.job_optimizer import sparse_parameters


def check_optimizer_shards(outline: Outline, plan: Plan, errors: list[str]) -> tuple[str, ...]:
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

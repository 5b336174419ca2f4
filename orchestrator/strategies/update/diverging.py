"""Modules whose parameters would drift apart on the replicas of a model."""

from __future__ import annotations

from torch import nn

from orchestrator.config.text import first_few
from orchestrator.planning.plan import Plan


def diverging_errors(model: nn.Module | None, plan: Plan) -> list[str]:
    """Return why the replicas of a ``model`` would not stay equal; empty if nothing is known to change them.

    ``max_norm`` of an embedding rescales the rows that a replica looks up, and only there. Shards that hold the
    parameters never see it.
    """
    copies = plan.mesh.data_parallel_size * plan.devices_per_worker + plan.mesh.num_servers
    if copies == 1 or model is None:
        return []
    tables = [
        name
        for name, module in model.named_modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None
    ]
    if not tables:
        return []
    return [
        f"max_norm of {first_few(tables, 2)}: each replica would rescale only the rows that its own samples look up, "
        "and its weights would no longer equal the others'; leave it out, or use strategy=single or "
        "strategy=pipeline"
    ]

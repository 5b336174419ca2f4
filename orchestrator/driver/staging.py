"""Whether the job's model can be cut as planned: found out on the driver, with fake tensors, before anything starts."""

from __future__ import annotations

import contextlib

import torch
from torch.utils.data import default_collate

from orchestrator.config.schema import Config, StagedConfig
from orchestrator.job import Job
from orchestrator.mesh import even_shares
from orchestrator.model.cut import balance, cut_at
from orchestrator.model.layers import flow
from orchestrator.model.sequence import LayerSequence
from orchestrator.model.stages import boundaries_of, sequence_of
from orchestrator.plan import Plan
from orchestrator.worker import deferred_dynamo


def staging_faults(config: Config, job: Job, plan: Plan) -> list[str]:
    """What is wrong with cutting the model into the plan's stages; nothing where it is not cut."""
    strategy, layout = config.strategy, plan.pipeline
    if layout is None or not isinstance(strategy, StagedConfig):
        return []
    deferred_dynamo.install()
    share = even_shares(plan.global_batch_size, plan.mesh.data_parallel_size)[0]
    rows = share // plan.grad_accumulation // layout.num_microbatches
    split = () if strategy.split == "auto" else strategy.split
    collate = job.collate or default_collate
    try:
        inputs, _ = collate([job.dataset("train")[0]] * rows)
        sequence = sequence_of(job.model, inputs, torch.device("cpu"), split=split)
        if strategy.split == "auto":
            return _too_few(sequence, plan)
        cut, faults = cut_at(sequence.layers, split, layout.num_stages)
        if cut is not None:
            boundaries_of(sequence, flow(sequence, inputs, precision=contextlib.nullcontext), cut)
        return faults
    except ValueError as e:
        return [str(e) if str(e).startswith("strategy.") else f"strategy={strategy.name}: {e}"]


def _too_few(sequence: LayerSequence, plan: Plan) -> list[str]:
    layers, layout = sequence.layers, plan.pipeline
    assert layout is not None
    try:
        balance(layers, [1.0] * len(layers), layout.num_stages)
    except ValueError as e:
        per_rank = layout.num_stages // plan.mesh.pipeline_parallel_size
        key = "strategy.num_workers"
        if plan.strategy == "ddp_pipeline":
            key = "strategy.pipeline_parallel_size"
        lower = f"lower {key}" + (" or strategy.stages_per_rank" if per_rank > 1 else "")
        return [f"{key}={plan.mesh.pipeline_parallel_size}: the model has {e}; {lower}, or give the model more layers"]
    return []

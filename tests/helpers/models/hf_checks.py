"""What divides or cuts a model of ``hf_table``, without training it."""

import torch

from helpers.models.catalogue import MODELS, job_of
from helpers.models.hf_table import Kind
from helpers.models.pieces import difference
from orchestrator.compat.torch import BatchNorm
from orchestrator.model.partial_init import build_fake
from orchestrator.model.precision import Precision
from orchestrator.model.stages.own_stages import sequence_of
from orchestrator.strategies.data.batch_parts import BatchDivision, mean_loss, warning_about_parts
from orchestrator.strategies.data.datasets import example_batch

CPU = torch.device("cpu")


def on_parts(kind: Kind, model_type: str) -> str:
    """What replicas and micro-batches change; empty if nothing."""
    job = job_of(f"{kind}/{model_type}")
    torch.manual_seed(0)
    division = BatchDivision(by="ddp", rows=4, in_turn=True)
    found = warning_about_parts(
        job.model().train(),
        job,
        job.dataset("train"),
        division,
        device=CPU,
        precision=Precision(),
        seed=3,
        loss=mean_loss(job),
    )
    return found.text if found else ""


def in_stages(kind: Kind, model_type: str) -> str:
    """Why the model is refused in two stages, or what differs there; empty if it trains as the whole."""
    job = job_of(f"{kind}/{model_type}", in_stages=True)
    inputs, target = example_batch(job, job.dataset("train"), 2)
    try:
        sequence = sequence_of(build_fake(job.model, CPU), inputs, split=(), num_stages=2, job=job)
    except ValueError as e:
        return str(e)
    return difference(job.model, sequence, inputs, lambda output: job.loss(output, target)) or ""


def has_batch_norm(kind: Kind, model_type: str) -> bool:
    """Whether the model has a BatchNorm, which depends on the division of a batch by nature."""
    with torch.device("meta"):
        return any(isinstance(module, BatchNorm) for module in MODELS[f"{kind}/{model_type}"].build().modules())

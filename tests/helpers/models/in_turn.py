"""Training of a model that is divided by ``strategy.tensor``, by all ranks in turn, beside that of the whole model."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from helpers.conformance.cases import having
from orchestrator.compat.generators import drawing
from orchestrator.job import Job
from orchestrator.model.tensor.peers import Peers, in_lockstep
from orchestrator.strategies.constructor import Outline
from orchestrator.strategies.transforms.tensor import tensor_errors
from orchestrator.strategies.transforms.tensor_division import TensorPlan

STEPS = 3


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What dividing a model has led to.

    Attributes:
        refusal: why it is not divided; empty if it is.
        plan: how it is divided; None if it is not.
        apart: how far losses, norms of gradients and the loss of an evaluation are from those of the whole model.
    """

    refusal: str = ""
    plan: TensorPlan | None = None
    apart: float = 0.0


def trained(job: Job, size: int = 2, *, sequence: bool = False) -> Trained:
    """Train a job for a few steps in float64, whole and divided, with all samples in each step."""
    outline = Outline(job, having())
    errors, _ = tensor_errors(outline, job.dataset("train"), size, sequence=sequence)
    if errors:
        return Trained(refusal=errors[0])
    plan: TensorPlan = outline.found["tensor", size]
    with drawing(0):
        model = outline.build()
    whole = _numbers(job, model)

    def of_rank(index: int, peers: Peers) -> list[float]:
        with drawing(0):
            own = plan.divided(outline.build, index=index, peers=peers)()
        return _numbers(job, own, peers, plan)

    ranks = in_lockstep(size, of_rank)
    apart = [abs(a - b) / max(abs(b), 1e-9) for rank in ranks for a, b in zip(rank, whole, strict=True)]
    return Trained(plan=plan, apart=max(value if value == value else float("inf") for value in apart))


def _numbers(job: Job, model: nn.Module, peers: Peers | None = None, plan: TensorPlan | None = None) -> list[float]:
    model = model.double().train()
    optimizer: Any = job.optimizer(model.parameters())
    found = []
    for step in range(STEPS):
        torch.manual_seed(step)
        optimizer.zero_grad()
        loss = _loss(job, model, "train")
        loss.backward()
        found += [float(loss), float(_square_of_norm(model, peers, plan).sqrt())]
        optimizer.step()
    model.eval()
    with torch.no_grad():
        return [*found, float(_loss(job, model, "val"))]


def _loss(job: Job, model: nn.Module, split: Any) -> Tensor:
    dataset = job.dataset(split)
    inputs, target = default_collate([dataset[index] for index in range(len(dataset))])
    return job.loss(job.forward(model, inputs), target)


def _square_of_norm(model: nn.Module, peers: Peers | None, plan: TensorPlan | None) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        if peers is not None and plan is not None and name in plan.partial:
            parameter.grad = peers.sum(parameter.grad)
        square = parameter.grad.square().sum()
        total += peers.sum(square) if peers is not None and plan is not None and name in plan.cuts else square
    return total

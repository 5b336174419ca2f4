"""Training of a model that is divided by ``strategy.tensor``, by all ranks in turn, beside that of the whole model."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from helpers.conformance.cases import having
from orchestrator.compat.generators import drawing
from orchestrator.job import Job, Split
from orchestrator.model.batch import map_tensors, split_batch
from orchestrator.model.peers import Peers, in_lockstep
from orchestrator.strategies.constructor import Outline
from orchestrator.strategies.data.datasets import make_batch
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


def trained(
    job: Job, size: int = 2, *, sequence: bool = False, samples: int = 4, dtype: torch.dtype = torch.float64
) -> Trained:
    """Train a job for a few steps, whole and divided, with its first samples in each step."""
    outline = Outline(job, having())
    errors, _ = tensor_errors(outline, job.dataset("train"), size, sequence=sequence)
    if errors:
        return Trained(refusal=errors[0])
    plan: TensorPlan = outline.found["tensor", size]
    train = _Loop(job, samples, dtype)
    with drawing(0):
        model = outline.build()
    whole = train.numbers(model)

    def of_rank(index: int, peers: Peers) -> list[float]:
        with drawing(0):
            own = plan.divided(outline.build, index=index, peers=peers)()
        return train.numbers(own, peers, plan)

    ranks = in_lockstep(size, of_rank)
    apart = [abs(a - b) / max(abs(b), 1e-9) for rank in ranks for a, b in zip(rank, whole, strict=True)]
    return Trained(plan=plan, apart=max(value if value == value else float("inf") for value in apart))


@dataclass(frozen=True)
class _Loop:
    job: Job
    samples: int
    dtype: torch.dtype

    def numbers(self, model: nn.Module, peers: Peers | None = None, plan: TensorPlan | None = None) -> list[float]:
        """Return losses and norms of gradients of a few steps, and the loss of an evaluation."""
        model = model.to(self.dtype).train()
        optimizer: Any = self.job.optimizer(model.parameters())
        found = []
        for step in range(STEPS):
            torch.manual_seed(step)
            optimizer.zero_grad()
            loss = self.loss(model, "train")
            loss.backward()
            found += [loss.item(), _square_of_norm(model, peers, plan).sqrt().item()]
            optimizer.step()
        model.eval()
        with torch.no_grad():
            return [*found, self.loss(model, "val").item()]

    def loss(self, model: nn.Module, split: Split) -> Tensor:
        dataset: Any = self.job.dataset(split)
        batch = make_batch(self.job.collate, [dataset[index] for index in range(self.samples)])
        inputs, target = map_tensors(lambda t: t.to(self.dtype) if t.is_floating_point() else t, split_batch(batch))
        return self.job.loss(self.job.forward(model, inputs), target)


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

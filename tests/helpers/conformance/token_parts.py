"""Samples divided by tokens, trained and evaluated in one process, beside a plain loop with the whole model."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from helpers.conformance.cases import having
from orchestrator.job import Job
from orchestrator.model.batch import split_batch
from orchestrator.model.context.tokens import ContextPart
from orchestrator.model.peers import Peers, in_lockstep
from orchestrator.strategies.constructor import Outline, constructor_of
from orchestrator.strategies.data.datasets import make_batch
from orchestrator.strategies.transforms.context import job_of_tokens, prove_more
from orchestrator.strategies.transforms.context_plan import ContextPlan
from orchestrator.strategies.transforms.context_search import found_context


@dataclass(frozen=True)
class Trained:
    """The losses and gradient norms of all steps, the loss of the evaluation, and what is left of the model."""

    numbers: Tensor
    state: dict[str, Tensor]


def planned(job: Job, count: int = 2) -> ContextPlan:
    """How the driver divides the samples of a job."""
    outline = Outline(job, having())
    found = found_context(outline, job.dataset("train"), count)
    prove_more(outline, found, seed=0)
    return found.plan


def trained(job: Job, plan: ContextPlan | None, *, steps: int = 3, rows: int = 4, clip: float | None = None) -> Trained:
    """Train on some samples, whole or as all parts of ``plan``."""
    outline = Outline(job, having())
    build = constructor_of(job, outline.train, outline.precision)
    data: Any = job.dataset("train")
    batches = [
        split_batch(make_batch(job.collate, [data[(i * rows + j) % len(data)] for j in range(rows)]))
        for i in range(steps)
    ]

    def of_rank(index: int, peers: Peers) -> Trained:
        own, make = job, build
        if plan is not None:
            part = ContextPart(index=index, count=plan.count, peers=peers)
            own, make = job_of_tokens(job, plan, part), plan.divided(build, part)
        torch.manual_seed(0)
        model = make()
        optimizer = job.optimizer([p for p in model.parameters() if p.requires_grad])
        numbers = []
        for inputs, target in batches:
            optimizer.zero_grad()
            loss = own.loss(own.forward(model, inputs), target)
            loss.backward()
            for parameter in model.parameters():
                if plan is not None and parameter.requires_grad:
                    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                    parameter.grad = peers.sum(gradient)
            found = [p.grad for p in model.parameters() if p.grad is not None]
            numbers += [loss.detach(), torch.stack([g.norm() for g in found]).norm()]
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
        model.eval()
        with torch.no_grad():
            inputs, target = batches[0]
            numbers.append(own.loss(own.forward(model, inputs), target))
        return Trained(
            torch.stack([n.double() for n in numbers]), {k: v.clone() for k, v in model.state_dict().items()}
        )

    if plan is None:
        return of_rank(0, Peers())
    ranks = in_lockstep(plan.count, of_rank)
    for other in ranks[1:]:
        torch.testing.assert_close(other.numbers, ranks[0].numbers)
    return ranks[0]


def difference(job: Job, plan: ContextPlan, **options: Any) -> float:
    """How far losses, norms and the evaluation of the parts are from those of the whole model, relative."""
    alone, parts = trained(job, None, **options), trained(job, plan, **options)
    return float(((alone.numbers - parts.numbers) / alone.numbers.abs().clamp(min=1e-6)).abs().max())

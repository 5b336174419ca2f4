"""``context``: the workers of a group compute the same samples together, each some of their tokens.

What that changes of a model is in :mod:`orchestrator.model.context.tokens`, and is proven before anything is trained.
The loss is computed of a worker's tokens if the job's loss is a mean over tokens, and otherwise of the output for all
of them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from orchestrator.compat.generators import drawing
from orchestrator.config.schema import Config, StrategyConfig
from orchestrator.config.text import first_few, to_cli
from orchestrator.job import Job
from orchestrator.model.context.tokens import ContextPart
from orchestrator.model.proofs.divided_tokens import Pass, prove
from orchestrator.model.proofs.proven_model import ProvenModel
from orchestrator.planning.mesh import Mesh
from orchestrator.planning.plan import Plan
from orchestrator.strategies.constructor import Outline
from orchestrator.strategies.data.datasets import opened_dataset
from orchestrator.strategies.groups import check_equal
from orchestrator.strategies.measure.device import WaitTimer
from orchestrator.strategies.rank_context import Context
from orchestrator.strategies.transforms.context_plan import ContextPlan
from orchestrator.strategies.transforms.context_search import FoundContext, found_context
from orchestrator.strategies.transforms.part import Part
from orchestrator.user_code.steering import view_of

LARGE = 4.0
"""By what matrices are multiplied to reach thresholds that usual ones do not."""


@dataclass(frozen=True)
class TokenPart(Part):
    """The tokens of one worker.

    Attributes:
        plan: how samples are divided.
        part: the tokens.
        waits: what a step waits for the workers that have the others.
    """

    dimension = "context"

    plan: ContextPlan
    part: ContextPart
    waits: WaitTimer

    @classmethod
    def layout_errors(cls, options: StrategyConfig, mesh: Mesh) -> list[str]:
        if mesh.context == 1 or not getattr(options, "sequence", False):
            return []
        return [
            f"strategy.sequence=true: with strategy.context={mesh.context}, workers have only some of the tokens "
            "already; set it to false"
        ]

    @classmethod
    def check(cls, config: Config, outline: Outline, plan: Plan, errors: list[str]) -> tuple[str, ...]:
        count = plan.mesh.context
        key, remedy = f"strategy.context={count}", f"use strategy.shard={count} in place of it"
        if config.train.compile is not False and not config.train.compiles_blocks:
            errors.append(
                f"train.compile={to_cli(config.train.compile)}: {key} divides what the blocks of the model compute; "
                "set it to blocks, which compiles each of them"
            )
            return ()
        try:
            found = found_context(outline, opened_dataset(outline.job, "train", config.seed), count)
            prove_more(outline, found, config.seed)
        except ValueError as e:
            errors.append(f"{key}: {e}; {remedy}")
            return ()
        plan_of_tokens, division = found.plan, found.plan.division
        outline.found["context", count] = plan_of_tokens
        loss = "of its own tokens"
        if not plan_of_tokens.by_rows:
            loss = "of all tokens, whose output it gathers, which takes memory"
        if division.ends_whole:
            loss = "and whatever follows the blocks of all tokens"
        notes = [
            f"{key} divides the tokens of each sample, as proven on the model; each worker computes the loss {loss}"
        ]
        if division.whole:
            notes.append(f"{key}: each worker computes all tokens in {first_few(list(division.whole), 2)}")
        return tuple(notes)

    @classmethod
    def outline(cls, outline: Outline, count: int, found: Mapping[Hashable, Any]) -> Outline:
        plan = found.get(("context", count))
        if not isinstance(plan, ContextPlan):
            return outline
        divided, part, before = plan, ContextPart(index=0, count=count), outline.transform
        job = job_of_tokens(outline.job, divided, part)
        return replace(outline, job=job, transform=lambda build: divided.divided(before(build), part), found={})

    @classmethod
    def called_with(cls, job: Job, inputs: Any) -> Any:
        return job.positioned(inputs)

    @classmethod
    def find(cls, context: Context, job: Job, train_set: Any) -> TokenPart:
        count = context.mesh.context
        plan = found_context(Outline(job, context.train), train_set, count).plan
        part = ContextPart(index=context.mesh.coords(context.global_rank).context, count=count)
        return cls(plan, part, WaitTimer(context.device, counts=False))

    def of(self, build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        return self.plan.divided(build, self.part)

    def connect(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        if group is not None:
            check_equal(self.plan, group, device, what="strategy.context: divisions of the samples")
        self.part.peers.group, self.part.peers.waiting = group, self.waits.waiting

    def begin(self, inputs: Any) -> None:
        self.part.begin(inputs)

    def whole(self, output: Any) -> Any:
        return self.part.whole(output, self.plan.division.outputs)

    def job(self, job: Job, *, by_rows: bool = True) -> Job:
        return job_of_tokens(job, replace(self.plan, by_rows=by_rows and self.plan.by_rows), self.part)


def job_of_tokens(job: Job, plan: ContextPlan, part: ContextPart) -> Job:
    """Return ``job`` with methods for a model that computes the tokens of ``part``. They are collective.

    Its ``forward`` takes whole samples, and returns this rank's rows, or, without gradients, those of all ranks.
    """

    def forward(self: Job, model: nn.Module, inputs: Any) -> Any:
        part.begin(inputs)
        output = job.forward(model, job.positioned(inputs))
        return output if torch.is_grad_enabled() else part.whole(output, plan.division.outputs)

    def loss(self: Job, output: Any, target: Any) -> Tensor:
        has_all = part.is_whole(output, plan.division.outputs) and not plan.division.ends_whole
        return job.loss(output, target) if has_all else plan.loss(job, output, target, part)

    def train_metrics(self: Job, output: Any, target: Any) -> Mapping[str, Tensor]:
        return job.train_metrics(part.whole(output, plan.division.outputs), target)

    methods = {"forward": forward, "loss": loss}
    if type(job).train_metrics is not Job.train_metrics:
        methods["train_metrics"] = train_metrics
    return cast(Job, view_of(job, methods))


def prove_more(outline: Outline, found: FoundContext, seed: int) -> None:
    """Compare what has been found with the whole model once more: other samples, other weights, and one after another.

    Raises:
        NotDivisible: something differs.
    """
    job, plan, model = outline.job, found.plan, found.model
    first, second = found.samples
    with drawing(0):
        if found.is_whole:
            initial = ProvenModel.initial(outline.build, seed=seed, dtype=model.dtype)
            passes = (Pass(first), Pass(second), Pass(first, trains=False))
            prove(job, initial, plan.division, passes, plan.count)
        if model.dtype is torch.float64:
            passes = (Pass(second), Pass(first, factor=LARGE), Pass(second, trains=False))
            prove(job, model, plan.division, passes, plan.count)

"""``context``: the workers of a group compute the same samples together, each some of their tokens.

What that changes of a model is in :mod:`orchestrator.model.context_part`, and is proven before anything is trained.
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
from orchestrator.compat.torch import BatchNorm, FakeTensor
from orchestrator.config.schema import Config
from orchestrator.config.text import to_cli
from orchestrator.job import Job
from orchestrator.model.batch import map_tensors
from orchestrator.model.context_part import (
    UNSEEN,
    Axes,
    ContextPart,
    NotDivisible,
    axes_of,
    divide_tokens,
    sample_length,
    shapes_in,
)
from orchestrator.model.context_proof import prove
from orchestrator.model.repeated_blocks import blocks_of
from orchestrator.model.tensor.block_calls import seen_calls
from orchestrator.model.tensor.peers import Peers
from orchestrator.planning.plan import Plan
from orchestrator.strategies.constructor import Outline
from orchestrator.strategies.data.datasets import example_batch, opened_dataset
from orchestrator.strategies.groups import check_equal
from orchestrator.strategies.measure.device import WaitTimer
from orchestrator.strategies.measure.job_metrics import loss_of
from orchestrator.strategies.rank_context import Context
from orchestrator.strategies.reduction import Weight, divisor_of, on_device, weighted, without_gradient
from orchestrator.strategies.transforms.loss_proof import loss_divides, shortened, tensors_of_tokens
from orchestrator.user_code.steering import view_of

ROWS, TOKENS = 2, 64
"""The samples, and the least number of tokens in each, with which a division is found and proven."""


@dataclass(frozen=True, kw_only=True)
class ContextPlan:
    """How the samples of a job are divided over ``count`` workers.

    Attributes:
        count: the number of parts.
        blocks: the axes of what each repeated block is called with, by its name.
        outputs: those of the output of the model.
        by_rows: whether the loss is the mean of the losses of the parts, so that no worker needs the whole output.
    """

    count: int
    blocks: Mapping[str, Axes]
    outputs: Axes
    by_rows: bool = False

    def divided(self, build: Callable[[], nn.Module], part: ContextPart) -> Callable[[], nn.Module]:
        """Return a constructor of the model that ``build`` returns, which computes the tokens of ``part``."""

        def built() -> nn.Module:
            model = build()
            divide_tokens(model, self.blocks, part)
            return model

        return built

    def loss(self, job: Job, output: Any, target: Any, part: ContextPart) -> Tensor:
        """Return the mean loss of whole samples, with the gradient of this rank's output. Collective.

        Args:
            job: the job.
            output: of the tokens of ``part``.
            target: of whole samples.
            part: the tokens.
        """
        if not self.by_rows:
            return loss_of(job, part.whole(output, self.outputs), target)
        own = part.rows(job.aligned(target))
        given = job.weight(own)
        weight = _labels_in(own, part.length // self.count) if given is None else given
        if not isinstance(weight, FakeTensor):
            without_gradient(output, weight, inside=False)  # others use this rank's keys and values
        loss_sum = weighted(loss_of(job, output, own), weight)
        sums = part.peers.sum(torch.stack((loss_sum.detach(), on_device(weight, loss_sum.device).to(loss_sum.dtype))))
        total = cast(Tensor, divisor_of(sums[1]))
        return sums[0] / total + (loss_sum - loss_sum.detach()) / total


@dataclass(frozen=True)
class ContextParts:
    """The tokens of one worker.

    Attributes:
        plan: how samples are divided.
        part: the tokens.
        waits: what a step waits for the workers that have the others.
    """

    plan: ContextPlan
    part: ContextPart
    waits: WaitTimer

    def of(self, build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        """Return a constructor of the model that ``build`` returns, which computes these tokens."""
        return self.plan.divided(build, self.part)

    def connect(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        """Compute with the ranks of ``group``; None: with no others. Collective."""
        if group is not None:
            check_equal(self.plan, group, device, what="strategy.context: divisions of the samples")
        self.part.peers.group, self.part.peers.waiting = group, self.waits.waiting

    def begin(self, job: Job, inputs: Any) -> Any:
        """Begin a pass with whole samples. Return what a model of :meth:`of` is called with."""
        self.part.begin(inputs)
        return job.positioned(inputs)

    def whole(self, output: Any) -> Any:
        """Return the output for all tokens. Collective."""
        return self.part.whole(output, self.plan.outputs)

    def job(self, job: Job, *, by_rows: bool = True) -> Job:
        """Return the job for passes through a model of :meth:`of`.

        ``by_rows``: whether a loss that is a mean over tokens is computed of this rank's tokens.
        """
        return job_of_tokens(job, replace(self.plan, by_rows=by_rows and self.plan.by_rows), self.part)


def job_of_tokens(job: Job, plan: ContextPlan, part: ContextPart) -> Job:
    """Return ``job`` with methods for a model that computes the tokens of ``part``. They are collective.

    Its ``forward`` takes whole samples, and returns this rank's rows, or, without gradients, those of all ranks.
    """

    def forward(self: Job, model: nn.Module, inputs: Any) -> Any:
        part.begin(inputs)
        output = job.forward(model, job.positioned(inputs))
        return output if torch.is_grad_enabled() else part.whole(output, plan.outputs)

    def loss(self: Job, output: Any, target: Any) -> Tensor:
        has_all = part.is_whole(output, plan.outputs)
        return job.loss(output, target) if has_all else plan.loss(job, output, target, part)

    def train_metrics(self: Job, output: Any, target: Any) -> Mapping[str, Tensor]:
        return job.train_metrics(part.whole(output, plan.outputs), target)

    methods = {"forward": forward, "loss": loss}
    if type(job).train_metrics is not Job.train_metrics:
        methods["train_metrics"] = train_metrics
    return cast(Job, view_of(job, methods))


def found_context(outline: Outline, train_set: Any, count: int) -> tuple[ContextPlan, Any]:
    """Find how the samples of a job can be divided, from passes with fake tensors.

    Args:
        outline: the job and its model.
        train_set: provides a sample.
        count: the number of workers.

    Returns:
        The plan, and inputs of a few tokens to prove it with.

    Raises:
        ValueError: they cannot be divided; the text says why.
    """
    job, whole = outline.job, outline.whole
    with drawing(0):
        inputs, target = example_batch(job, train_set, ROWS)
    names = {module: name for name, module in whole.model.named_modules()}
    blocks = {names[block]: block for block in blocks_of(whole.model)}
    if not blocks:
        raise NotDivisible("the model has no nn.ModuleList or nn.Sequential with several blocks of one class")
    if norm := next((name for m, name in names.items() if isinstance(m, BatchNorm) and m.training), None):
        raise NotDivisible(f"{norm} would have the statistics of a worker's own tokens")
    length = sample_length(inputs)
    ContextPart(index=0, count=count).begin(inputs)

    tokens = min(length, -(-TOKENS // (2 * count)) * 2 * count)
    short, shorter = (shortened(inputs, length, n) for n in (tokens, tokens // 2))

    def pass_of(inputs: Any) -> Any:
        return job.forward(whole.model, map_tensors(whole.fake_input, job.positioned(inputs)))

    try:
        one, output = seen_calls(whole, blocks, lambda: pass_of(short))
        two, shorter_output = seen_calls(whole, blocks, lambda: pass_of(shorter))
    except Exception as e:
        raise NotDivisible(f"the model cannot be called with short samples ({type(e).__name__}: {e})") from e
    plan = ContextPlan(
        count=count,
        blocks={name: axes_of(*(shapes_in((c.args, c.kwargs)) for c in (one[name], two[name]))) for name in blocks},
        outputs=axes_of(shapes_in(output), shapes_in(shorter_output)),
    )
    if all(axis is None or axis == UNSEEN for axis in plan.outputs):
        raise NotDivisible("the output of the model has no row for each token")
    by_rows = replace(plan, by_rows=True)

    def part_of(index: int, peers: Peers | None = None) -> ContextPart:
        return ContextPart(index=index, count=count, peers=peers or Peers(), length=tokens)

    divides = loss_divides(
        job,
        output,
        shortened(target, length, tokens),
        count=count,
        cut=lambda tree, index: part_of(index).rows(tree, plan.outputs),
        loss=lambda own, labels, index, peers: by_rows.loss(job, own, labels, part_of(index, peers)),
    )
    return by_rows if divides else plan, short


def _labels_in(target: Any, tokens: int) -> Weight:
    """Return how many labels a target has for so many tokens of each sample, without those that are ignored."""
    found = tensors_of_tokens(target, tokens)
    counts = [torch.as_tensor(t.numel()) if t.is_floating_point() else (t >= 0).sum() for t in found]
    return torch.stack(counts).sum() if counts else 1


def context_parts(context: Context, job: Job, train_set: Any) -> ContextParts | None:
    """Return the tokens of a rank; None if samples are not divided."""
    count = context.mesh.context
    if count == 1:
        return None
    plan, _ = found_context(Outline(job, context.train), train_set, count)
    part = ContextPart(index=context.mesh.coords(context.global_rank).context, count=count)
    return ContextParts(plan, part, WaitTimer(context.device, counts=False))


def context_outline(outline: Outline, count: int, found: Mapping[Hashable, Any]) -> Outline:
    """Return the outline of what one of ``count`` workers computes, given what :func:`check_context` has found."""
    plan = found.get(("context", count))
    if not isinstance(plan, ContextPlan):
        return outline
    divided, part, before = plan, ContextPart(index=0, count=count), outline.transform
    job = job_of_tokens(outline.job, divided, part)
    return replace(outline, job=job, transform=lambda build: divided.divided(before(build), part), found={})


def check_context(config: Config, outline: Outline, plan: Plan, errors: list[str]) -> tuple[str, ...]:
    """Check that samples can be divided over the workers of ``plan.mesh.context``; return notes for the user."""
    count = plan.mesh.context
    if count == 1:
        return ()
    key, remedy = f"strategy.context={count}", f"use strategy.shard={count} in place of it"
    if config.train.compile is not False and not config.train.compiles_blocks:
        errors.append(
            f"train.compile={to_cli(config.train.compile)}: {key} divides what the blocks of the model compute; set it "
            "to blocks, which compiles each of them"
        )
        return ()
    try:
        found, inputs = found_context(outline, opened_dataset(outline.job, "train", config.seed), count)
        prove(outline.job, outline.build, found.blocks, found.outputs, inputs, count)
    except ValueError as e:
        errors.append(f"{key}: {e}; {remedy}")
        return ()
    outline.found["context", count] = found
    loss = "of its own tokens" if found.by_rows else "of all tokens, whose output it gathers, which takes memory"
    return (f"{key} divides the tokens of each sample, as proven on the model; each worker computes the loss {loss}",)

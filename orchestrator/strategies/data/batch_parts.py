"""Whether a job trains otherwise when its batches are divided: measured on one batch and its halves, before training.

A strategy that divides the global batch equals ``single`` if the loss is a mean over samples, weighted by
``Job.weight``, and if forward passes leave the same state behind. A loss that sums or compares samples is none, and a
layer that keeps statistics of what it has seen leaves another state. BatchNorm is known by its class, so the notes of
the plan tell of it, and it is left out here.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from orchestrator.compat.generators import kept_generators
from orchestrator.config.text import first_few
from orchestrator.job import Job
from orchestrator.model.batch import has_row_per_sample, rows_between, split_batch, to_device
from orchestrator.model.precision import Precision, summable
from orchestrator.model.repeatable_passes import Passed, passed
from orchestrator.strategies.data.datasets import check_dataset, is_stream, make_batch
from orchestrator.strategies.data.unequal_losses import unequal
from orchestrator.user_code.errors import error_text

FEWEST, MOST = 4, 32
"""Limits of the number of samples that are compared. Without gradients, a forward pass of the fewest needs about the
memory of a training step with one."""

GRADIENT_TOLERANCE = 10
"""How many times the tolerance of a loss the gradients may differ."""

GOLDEN = (math.sqrt(5) - 1) / 2

SHARE = 0.25
"""A part of a loss, of whose gradient the same part is expected."""

TOLERANCE = 1e-4
"""The relative difference of two losses in float32 that rounding explains, as in the comparison of stages."""


@dataclass(frozen=True)
class Remark:
    """What the user should know of the set-up of a rank.

    Attributes:
        text: for the user.
        kind: ``otherwise`` if the job trains otherwise on parts of a batch than on the whole, ``not compared`` if that
            could not be found out.
    """

    text: str
    kind: Literal["note", "otherwise", "not compared"] = "note"


@dataclass(frozen=True, kw_only=True)
class BatchDivision:
    """How a strategy divides the global batch.

    Attributes:
        by: what divides it, such as ``strategy=ddp with 2 replicas``.
        rows: the number of samples of a part.
        in_turn: whether a replica of the model sees several parts in a step.
        cut: whether parts are cut out of a collated batch; otherwise each is collated by itself.
        synchronous: whether the losses of all parts are to equal the loss of the whole batch.
    """

    by: str
    rows: int
    in_turn: bool
    cut: bool = False
    synchronous: bool = True


@dataclass(frozen=True, kw_only=True)
class BatchPart:
    """Some samples on the device, and what they weigh in a mean."""

    inputs: Any
    target: Any
    weight: float | Tensor


LossOfParts = Callable[[Sequence[Any], Sequence[BatchPart]], Tensor]
"""Returns the mean loss of a batch, given the outputs for its parts and the parts."""


def mean_loss(job: Job) -> LossOfParts:
    """Return the mean of the losses of all parts, as most strategies compute it."""

    def mean(outputs: Sequence[Any], parts: Sequence[BatchPart]) -> Tensor:
        weights = torch.stack([torch.as_tensor(part.weight, dtype=torch.float64).cpu() for part in parts])
        losses = [summable(job.loss(out, part.target)).cpu() for out, part in zip(outputs, parts, strict=True)]
        counted = torch.where(weights > 0, torch.stack(losses).double() * weights, 0.0)
        return counted.sum() / weights.sum()

    return mean


def warning_about_parts(
    model: nn.Module,
    job: Job,
    train_set: Any,
    division: BatchDivision,
    *,
    device: torch.device,
    precision: Precision,
    seed: int,
    loss: LossOfParts,
) -> Remark | None:
    """Compare one batch with its halves; return what the user should know, or None if they train the same.

    Gradients are compared too, unless training computes those of so few samples at once that memory may be short.
    The model, its parameters and buffers and the random generators are left as they are. Dropout does nothing here.

    Args:
        model: the whole model, on the device.
        job: defines the loss and the weights.
        division: how the strategy divides a batch.
        device: where to compute.
        precision: what the forward passes are computed in.
        loss: the loss of a divided batch, such as :func:`mean_loss`.
    """

    def forward(model: nn.Module, part: BatchPart) -> Any:
        with precision.autocast():
            return precision.outputs(job.forward(model, part.inputs))

    def loss_of(outputs: Sequence[Any], parts: Sequence[BatchPart]) -> Tensor:
        with precision.autocast():
            if len(parts) == 1 and division.synchronous and not far_apart:
                far_apart.append(
                    _losses_far_apart(job, outputs[0], parts[0].target, loss, rows=len(items), tolerance=far)
                )
            return loss(outputs, parts)

    def run(number: int, seed: int, *, in_turn: bool = False, mixed: bool = False, share: float = 1.0) -> Passed:
        chosen = [*items[::2], *items[1::2]] if mixed else items
        parts = functools.partial(_parts, job, chosen, number, cut=division.cut, device=device, precision=precision)
        return passed(
            model,
            parts,
            forward,
            lambda outputs, parts: loss_of(outputs, parts) * share,
            in_turn=in_turn,
            seed=seed,
            nudged=nudged,
            gradients=with_gradients,
        )

    def halves(*, in_turn: bool = False, mixed: bool = False) -> Passed:
        """Run both halves. Gradients are compared at once, because there may be no memory for more of them."""
        found = run(2, seed, in_turn=in_turn, mixed=mixed)
        for name, by in found.gradients_apart(whole).items():
            apart[name] = max(by, apart.get(name, 0.0))
        return replace(found, gradients={})

    nudged: Collection[str] = ()
    apart: dict[str, float] = {}
    far_apart: list[tuple[float, float] | None] = []
    with_gradients = division.synchronous and division.rows >= FEWEST // 2
    tolerance = _tolerance(precision, device, {p.dtype for p in model.parameters()})
    far = GRADIENT_TOLERANCE * tolerance
    with kept_generators(device):
        try:
            items = spread(train_set, min(max(division.rows, FEWEST), MOST))
        except Exception:
            return None  # training reads these samples as well, and says what is wrong with them
        if len(items) < 2:
            return None
        try:
            whole = run(1, seed)
            if nudged := whole.states[0].keys() & {name for name, _ in model.named_parameters()}:
                whole = run(1, seed)  # a teacher that begins as an exact copy would follow without a change
            tries = [halves(in_turn=in_turn) for in_turn in dict.fromkeys((False, division.in_turn))]
            # The weights of their classes may make two halves equal by chance, or because classes come in turn.
            others = [*tries, halves(mixed=True)] if division.synchronous else []
            differing = [t for t in others if t.differs(whole, tolerance)]
            if tolerance < max(apart.values(), default=0.0) <= far:  # much alike, which hides a hook that normalizes
                apart = run(1, seed, share=SHARE).gradients_apart(whole, share=SHARE)
            gradients = [name for name, by in apart.items() if by > far]
            changed = list(dict.fromkeys(name for t in tries for name in t.changed(whole, tolerance)))
            if differing or changed or gradients:  # because of random numbers that are not torch's?
                other = run(1, seed + 1)
                differing = [] if other.differs(whole, tolerance) else differing
                changed = [name for name in changed if name not in other.changed(whole, tolerance)]
                drawn = other.gradients_apart(whole)
                gradients = [name for name in gradients if drawn.get(name, 0.0) <= far]
        except Exception as e:  # the job may do anything; if training cannot do it either, it says so
            return not_compared(division, " ".join(error_text(e).split())[:300])
    losses = (float(whole.loss), float(differing[0].loss)) if differing else None
    return otherwise(
        division,
        samples=len(items),
        losses=losses,
        far_apart=None if losses or changed or gradients else next(iter(far_apart), None),
        gradients=gradients,
        changed=changed,
        parameters=bool({name for name, _ in model.named_parameters()}.intersection(changed)),
    )


def _losses_far_apart(
    job: Job, output: Any, target: Any, loss: LossOfParts, *, rows: int, tolerance: float
) -> tuple[float, float] | None:
    """Return the loss of a batch of which one half has a small loss and the other a large one, and that of its halves.

    None if they are equal up to ``tolerance``, or if that cannot be told: the output and the target have not a row for
    each sample, or the losses are not finite, or draw random numbers.
    """
    half = rows // 2
    if not has_row_per_sample((output, target), rows):
        return None

    def of(whole: Any, *bounds: tuple[int, int]) -> Tensor:
        targets = [rows_between(target, *bound) for bound in bounds]
        weights = [job.weight(part) for part in targets]
        parts = [
            BatchPart(inputs=None, target=part, weight=end - begin if weight is None else weight)
            for part, weight, (begin, end) in zip(targets, weights, bounds, strict=True)
        ]
        return loss([rows_between(whole, *bound) for bound in bounds], parts)

    try:
        with torch.enable_grad():
            moved = unequal(lambda whole: of(whole, (0, rows)), output, lambda tree: rows_between(tree, 0, half))
        with torch.no_grad():
            found, again = (float(of(moved, (0, rows))) for _ in range(2))
            of_halves = float(of(moved, (0, half), (half, rows)))
    except Exception:  # the job may take other outputs than its model has, such as probabilities
        return None
    is_known = found == again and math.isfinite(of_halves)  # not so of NaN
    return (found, of_halves) if is_known and abs(found - of_halves) > tolerance * abs(found) else None


def by_keys(strategy: str, **numbers: int) -> str:
    """Return what divides a batch, as typed on the command line; numbers of 1 do not."""
    keys = {"num_workers": "strategy.", "num_microbatches": "strategy.", "grad_accumulation": "train."}
    given = [f"{keys[name]}{name}={number}" for name, number in numbers.items() if number > 1]
    return " ".join([f"strategy={strategy}", *given])


def not_compared(division: BatchDivision, reason: str) -> Remark:
    """Return the warning about a comparison that could not be made."""
    text = (
        f"{division.by}: the loss of a batch was not compared with those of its halves ({reason}); a loss that sums or "
        "compares samples would differ from that of strategy=single"
    )
    return Remark(text, "not compared")


def otherwise(
    division: BatchDivision,
    *,
    samples: int,
    losses: tuple[float, float] | None,
    far_apart: tuple[float, float] | None,
    gradients: Sequence[str],
    changed: Sequence[str],
    parameters: bool,
) -> Remark | None:
    """Return the warning about a loss and a state that depend on the division; None if there are none.

    Args:
        division: how the strategy divides a batch.
        samples: the number of samples that were compared.
        losses: the loss of the batch, and the mean of the losses of its halves; None if they are equal.
        far_apart: the same for outputs of which one half has a small loss and the other a large one.
        gradients: the names of the parameters whose gradients are not the means over the halves.
        changed: the names of the tensors that forward passes leave with other values.
        parameters: whether some of these are parameters, which workers do not share as they share buffers.
    """
    if losses is None and far_apart is None and not changed and not gradients:
        return None
    found, remedies = [], []
    if losses is not None:
        found.append(f"the loss of {samples} samples is {losses[0]:.6g}, the mean over their halves {losses[1]:.6g}")
        remedies += [
            "let Job.loss return a mean, and Job.weight what that divides by (valid tokens, the sum of class weights)",
            "compute a loss that compares samples in Job.training_step with gather_batch (strategy=ddp)",
        ]
    elif gradients:
        found.append(f"the loss is the mean over the halves, and the gradient of {first_few(gradients, 2)} is not")
        remedies.append(
            "leave out what makes a gradient depend on the other samples (nn.Embedding with scale_grad_by_freq, a hook "
            "or an autograd function that normalizes it)"
        )
    if far_apart is not None:
        found.append(
            f"if one half of {samples} samples has a small loss and the other a large one, the loss of all is "
            f"{far_apart[0]:.6g}, the mean over the halves {far_apart[1]:.6g}"
        )
        remedies.append("limit or bend the loss of each sample, not their mean")
    if changed:
        when = "and those of the first worker's samples are kept"
        if division.in_turn:
            when = "once for each part"
        elif parameters:
            when = "and each worker keeps those of its own samples; make them buffers (register_buffer) to share them"
        found.append(f"forward passes change {first_few(changed, 3)}, {when}")
        remedies.append("for statistics of batches, take nn.BatchNorm with strategy=ddp strategy.sync_batchnorm=true")
    text = (
        f"{division.by}: this job trains otherwise on parts of a batch than on the whole: {'; '.join(found)}. "
        f"Remedies: {'; '.join(remedies)}; or use strategy=single train.grad_accumulation=1"
    )
    return Remark(text, "otherwise")


def spread(dataset: Any, count: int) -> list[Any]:
    """Return up to ``count`` samples from all over a data set, which may be sorted; the first ones of a stream.

    They are not evenly spaced, because kinds of samples may come in turn.
    """
    check_dataset(dataset, split="train")
    if is_stream(dataset):
        return list(itertools.islice(dataset, count))
    count = min(count, len(dataset))
    bounds = [len(dataset) * number // count for number in range(count + 1)]
    offsets = (number * GOLDEN % 1 for number in range(count))
    return [
        dataset[a + int(offset * (b - a))] for (a, b), offset in zip(itertools.pairwise(bounds), offsets, strict=True)
    ]


def _parts(
    job: Job, items: Sequence[Any], number: int, *, cut: bool, device: torch.device, precision: Precision
) -> list[BatchPart]:
    """Return the samples in that many parts. They are copied, because ``Job.collate`` may change them."""
    collate = functools.partial(make_batch, job.collate)
    bounds = [len(items) * i // number for i in range(number + 1)]
    if cut:
        whole = collate(copy.deepcopy(list(items)))
        batches = [rows_between(whole, begin, end) for begin, end in itertools.pairwise(bounds)]
    else:
        batches = [collate(copy.deepcopy(list(items[begin:end]))) for begin, end in itertools.pairwise(bounds)]
    parts = []
    for batch, (begin, end) in zip(batches, itertools.pairwise(bounds), strict=True):
        inputs, target = split_batch(to_device(batch, device))
        weight = job.weight(target)
        parts.append(
            BatchPart(inputs=precision.inputs(inputs), target=target, weight=end - begin if weight is None else weight)
        )
    return parts


def _tolerance(precision: Precision, device: torch.device, dtypes: Collection[torch.dtype]) -> float:
    """Return by how much two losses may differ that are computed from the same samples in other shapes.

    Args:
        precision: what the forward passes are computed in.
        device: where they are computed.
        dtypes: those of the parameters.
    """
    coarse = {torch.bfloat16, torch.float16} & {*dtypes, precision.autocast_dtype, precision.model_dtype}
    if device.type == "cuda" and torch.get_float32_matmul_precision() != "highest":
        coarse.add(torch.float16)  # TF32 has its digits
    return max([TOLERANCE, *(4 * torch.finfo(dtype).eps for dtype in coarse)])

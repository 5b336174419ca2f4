"""Whether a job's loss of a divided output is that of the whole one, tried with random numbers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from orchestrator.compat.generators import drawing
from orchestrator.job import Job
from orchestrator.model.batch import map_tensors, tensors_in
from orchestrator.model.peers import Peers, in_lockstep
from orchestrator.model.proofs.proving import TOLERANCE, difference
from orchestrator.strategies.data.unequal_losses import gradients_of, largest_of, unequal, with_gradients

IGNORED = -100
"""The label that torch's losses leave out."""
FEWEST_LABELS = 4
"""The number of the smallest labels, which a loss may treat in another way than others."""


def tensors_of_tokens(tree: Any, tokens: int) -> list[Tensor]:
    """Return the tensors of a tree that have a number or a row for each of so many tokens of a sample."""
    return [tensor for tensor in tensors_in(tree) if tensor.ndim > 1 and tensor.shape[1] == tokens]


def loss_divides(
    job: Job,
    output: Any,
    target: Any,
    *,
    count: int,
    cut: Callable[[Any, int], Any],
    loss: Callable[[Any, Any, int, Peers], Tensor],
) -> bool:
    """Return whether the loss of a whole output, and its gradient, are those that each of ``count`` ranks computes.

    Also if labels are ignored, of some samples more than of others, and if the loss of one rank is small and that of
    others large, so that a limit of the mean is between them.

    Args:
        job: the job.
        output: fake tensors of the shapes of an output.
        target: its target.
        count: the number of ranks.
        cut: returns what of a whole output, or of its gradient, a rank has.
        loss: returns the loss, given that, the whole target, the number of the rank, and the others.
    """
    with drawing(0):
        output = map_tensors(_random, output)
    agreed = False
    for number, (values, labels) in enumerate(_tries(job, output, target, lambda tree: cut(tree, 0))):
        whole = with_gradients(values)
        try:
            wanted = job.loss(whole, labels)
            gradients = gradients_of(wanted, whole)
        except Exception:
            if number == 0:
                return False
            continue  # these are no labels
        if not wanted.isfinite():
            continue
        if number == 0 and not largest_of(gradients):  # a limit that is reached says nothing of others
            return False

        def agrees(index: int, peers: Peers, tried: Any = (values, labels), wanted: Any = (wanted, gradients)) -> bool:
            own, labels = with_gradients(cut(tried[0], index)), tried[1]
            found = loss(own, labels, index, peers)
            pairs = [(found.detach(), wanted[0].detach())]
            pairs += zip(tensors_in(gradients_of(found, own)), tensors_in(cut(wanted[1], index)), strict=True)
            return all(difference(one, other) <= TOLERANCE for one, other in pairs)

        try:
            if not all(in_lockstep(count, agrees)):
                return False
        except Exception:  # whatever a job raises that needs the whole
            return False
        agreed = True
    return agreed


def _tries(job: Job, output: Any, target: Any, first: Callable[[Any], Any]) -> Iterator[tuple[Any, Any]]:
    """Yield outputs and targets; ``first`` returns what the first rank has of an output."""
    targets = _targets(target)
    yield output, next(targets)
    yield unequal(lambda whole: job.loss(whole, target), output, first), target
    yield from ((output, labels) for labels in targets)


def _targets(target: Any) -> Iterator[Any]:
    """Yield a target, and others of whose labels some are ignored, or small ones, as those of padding often are."""
    yield target
    for labels in tensors_in(target):
        if not labels.is_floating_point() and labels.ndim > 1:
            ones = [1] * (labels.ndim - 2)
            rows, places = torch.arange(len(labels)).view(-1, 1, *ones), torch.arange(labels.shape[1]).view(-1, *ones)
            few = places < labels.shape[1] // 3 + rows % 2 * (labels.shape[1] // 6)
            for others in (torch.tensor(IGNORED), torch.tensor(-1), places % FEWEST_LABELS):
                fewer = labels.where(~few, others.to(labels.dtype))
                yield map_tensors(functools.partial(_replaced, labels, fewer), target)


def _replaced(tensor: Tensor, replacement: Tensor, other: Tensor) -> Tensor:
    return replacement if other is tensor else other


def _random(fake: Tensor) -> Tensor:
    if fake.is_floating_point():
        return torch.randn(fake.shape, dtype=torch.float64)
    return torch.zeros(fake.shape, dtype=fake.dtype)

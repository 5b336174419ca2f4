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
from orchestrator.model.proving import TOLERANCE, difference
from orchestrator.model.tensor.peers import Peers, in_lockstep

IGNORED = -100
"""The label that torch's losses leave out."""


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

    Also if labels are ignored, of some samples more than of others.

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
    for number, labels in enumerate(_targets(target)):
        whole = _with_gradients(output)
        try:
            wanted = job.loss(whole, labels)
            gradients = _gradients(wanted, whole)
        except Exception:
            if number == 0:
                return False
            continue  # these are no labels
        if not wanted.isfinite():
            continue

        def agrees(index: int, peers: Peers, labels: Any = labels, wanted: Any = (wanted, gradients)) -> bool:
            own = _with_gradients(cut(output, index))
            found = loss(own, labels, index, peers)
            pairs = [(found.detach(), wanted[0].detach())]
            pairs += zip(tensors_in(_gradients(found, own)), tensors_in(cut(wanted[1], index)), strict=True)
            return all(difference(one, other) <= TOLERANCE for one, other in pairs)

        try:
            if not all(in_lockstep(count, agrees)):
                return False
        except Exception:  # whatever a job raises that needs the whole
            return False
        agreed = True
    return agreed


def _targets(target: Any) -> Iterator[Any]:
    """Yield a target, and others in which some of its labels are ignored."""
    yield target
    for labels in tensors_in(target):
        if not labels.is_floating_point() and labels.ndim > 1:
            fewer, tokens = labels.clone(), labels.shape[1]
            for row, ignored in enumerate((tokens // 3, tokens // 2)):
                fewer[row::2, :ignored] = IGNORED
            yield map_tensors(functools.partial(_replaced, labels, fewer), target)


def _replaced(tensor: Tensor, replacement: Tensor, other: Tensor) -> Tensor:
    return replacement if other is tensor else other


def _random(fake: Tensor) -> Tensor:
    if fake.is_floating_point():
        return torch.randn(fake.shape, dtype=torch.float64)
    return torch.zeros(fake.shape, dtype=fake.dtype)


def _with_gradients(tree: Any) -> Any:
    return map_tensors(lambda t: t.detach().requires_grad_(t.is_floating_point()), tree)


def _gradients(loss: Tensor, tree: Any) -> Any:
    """Return the gradient of each tensor of a tree of :func:`_with_gradients`."""

    def of(tensor: Tensor) -> Tensor:
        if not tensor.requires_grad:
            return tensor
        (gradient,) = torch.autograd.grad(loss, tensor, retain_graph=True, allow_unused=True)
        return torch.zeros_like(tensor) if gradient is None else gradient

    return map_tensors(of, tree)

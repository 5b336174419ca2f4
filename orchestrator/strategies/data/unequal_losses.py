"""Outputs of a model of which one part has a small loss and another a large one, so that a limit is between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from orchestrator.model.batch import map_leaves, map_tensors, tensors_in

MOVED = 30.0
"""How far an output is moved along its gradient, which is at most one after that of a cross-entropy is scaled."""


def unequal(loss: Callable[[Any], Tensor], output: Any, first: Callable[[Any], Any]) -> Any:
    """Return an output of which one part has a small loss and the rest a large one; itself if no gradient tells how.

    A loss that is at its limit has no gradient, so that of zeros is taken then.

    Args:
        loss: of an output.
        output: its tensors may be changed in all their elements.
        first: returns the part of an output.
    """
    for tree in (output, map_tensors(lambda t: torch.zeros_like(t) if t.is_floating_point() else t, output)):
        whole = with_gradients(tree)
        slopes = gradients_of(loss(whole), whole)
        if largest := largest_of(slopes):
            break
    places = map_tensors(lambda tensor: torch.arange(tensor.numel(), device=tensor.device).view(tensor.shape), output)
    parts = zip(tensors_in(first(places)), tensors_in(output), strict=True)
    own = iter([part for part, tensor in parts if tensor.is_floating_point()])

    def moved(tensor: Tensor, slope: Tensor) -> Tensor:
        up = torch.ones(tensor.numel(), dtype=slope.dtype, device=slope.device)
        up[next(own).flatten()] = -1
        return tensor.detach() + up.view(tensor.shape) * slope * (MOVED / largest)

    def of(leaf: Any, slope: Any) -> Any:
        return moved(leaf, slope) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return map_leaves(of, output, slopes) if largest else output


def largest_of(slopes: Any) -> float:
    """Return the largest entry of a tree of gradients, without its sign."""
    floats = [slope for slope in tensors_in(slopes) if slope.is_floating_point() and slope.numel()]
    return max((float(slope.abs().max()) for slope in floats), default=0.0)


def with_gradients(tree: Any) -> Any:
    """Return a tree whose floating-point tensors are leaves of a graph of their own."""
    return map_tensors(lambda t: t.detach().requires_grad_(t.is_floating_point()), tree)


def gradients_of(loss: Tensor, tree: Any) -> Any:
    """Return the gradient of each tensor of a tree of :func:`with_gradients`."""

    def of(tensor: Tensor) -> Tensor:
        if not tensor.requires_grad:
            return tensor
        (gradient,) = torch.autograd.grad(loss, tensor, retain_graph=True, allow_unused=True)
        return torch.zeros_like(tensor) if gradient is None else gradient

    return map_tensors(of, tree)

"""Gradients of parts of a batch that have no units."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.strategies.reduction import weighted, without_gradient


class MeanOfNothing(torch.autograd.Function):
    """One operation with the layers and the loss in it, as a compiled model is. It makes NaN of a gradient of 0."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return weight.sum() * torch.nan

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (weight,) = ctx.saved_tensors
        return gradients[0] * torch.full_like(weight, torch.nan)


def test_a_loss_inside_a_single_operation_has_no_gradient_without_units() -> None:
    for count in (0, torch.tensor(0)):
        weight = nn.Parameter(torch.ones(3))
        loss: Tensor = MeanOfNothing.apply(2 * weight)
        without_gradient(loss, count)
        weighted(loss, count).backward()
        assert weight.grad is not None
        assert torch.equal(weight.grad, torch.zeros(3))

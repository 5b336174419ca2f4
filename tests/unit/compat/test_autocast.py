"""Autocast computes the products of experts in its type, as those of other layers."""

import pytest
import torch
from torch.nn import functional as F

from orchestrator.model.precision import Precision


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_grouped_products_are_those_of_a_loop_over_experts(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(24, 16, generator=generator)
    experts = torch.randn(3, 16, 16, generator=generator)
    ends = torch.tensor([5, 5, 24], dtype=torch.int32)  # the second one has no rows
    found = []
    for grouped in (True, False):
        x, w = rows.clone().requires_grad_(), experts.clone().requires_grad_()
        with Precision.named(name, "cpu").autocast():
            parts = zip([0, *ends[:-1].tolist()], ends.tolist(), w, strict=True)
            y = F.grouped_mm(x, w, offs=ends) if grouped else torch.cat([x[a:b] @ each for a, b, each in parts])
        y.float().square().sum().backward()
        assert x.grad is not None
        assert w.grad is not None
        found.append((y, x.grad, w.grad))
    (y, *gradients), (expected_y, *expected) = found
    assert y.dtype == expected_y.dtype == Precision.named(name, "cpu").autocast_dtype
    torch.testing.assert_close(y, expected_y, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(gradients, expected, rtol=2e-2, atol=2e-1)
    assert gradients[1].dtype == torch.float32
    assert F.grouped_mm(rows, experts, offs=ends).dtype == torch.float32

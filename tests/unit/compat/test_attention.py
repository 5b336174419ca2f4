"""Attention as GPUs run it, with tensors that have no values."""

import contextlib

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from orchestrator.compat.attention import FusedAttention
from orchestrator.compat.torch import FakeTensorMode
from orchestrator.model.stages.layers import kept_tensors

HEADS, POSITIONS = 4, 512


def kept(*, fused: bool, masked: bool) -> int:
    """What attention with dropout keeps, for which CPUs have no kernel of their own."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        query = torch.empty(1, HEADS, POSITIONS, 32, requires_grad=True)
        key = torch.empty(1, HEADS // 2, POSITIONS, 32, requires_grad=True)
        mask = torch.ones(1, 1, POSITIONS, POSITIONS, dtype=torch.bool) if masked else None
        with kept_tensors(nn.Module()) as found, FusedAttention() if fused else contextlib.nullcontext():
            out = F.scaled_dot_product_attention(
                query, key, key, mask, dropout_p=0.1, is_causal=not masked, enable_gqa=True
            )
            assert out.shape == query.shape
        del out
    return found.activations


def test_no_square_of_positions_is_kept() -> None:
    square_bytes = 4 * HEADS * POSITIONS**2
    assert kept(fused=True, masked=False) < square_bytes < kept(fused=False, masked=False)


@pytest.mark.parametrize("fused", [True, False])
def test_a_mask_is_allowed(fused: bool) -> None:
    assert kept(fused=fused, masked=True) > 0

"""Clipping of gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from helpers.conformance.cases import TRAIN, having
from orchestrator.strategies.update.gradients import clip


def test_each_entry_of_a_gradient_is_clipped_by_its_value() -> None:
    dense, sparse, none = (nn.Parameter(torch.zeros(3)) for _ in range(3))
    dense.grad = torch.tensor([-5.0, 0.25, 0.75])
    # The first index has two entries, which are over the limit only together, the last one two that are not.
    sparse.grad = torch.sparse_coo_tensor([[0, 0, 2, 2]], [0.4, 0.4, 0.7, -0.6], (3,), check_invariants=False)
    clip([dense, sparse, none], having(clip_value=0.5), None)
    assert dense.grad.tolist() == [-0.5, 0.25, 0.5]
    torch.testing.assert_close(sparse.grad.to_dense(), torch.tensor([0.5, 0.0, 0.1]))
    assert none.grad is None


def test_gradients_are_clipped_in_one_way() -> None:
    with pytest.raises(ValueError, match=r"train\.clip_value=0\.5: train\.clip_norm=1 clips the same gradients"):
        having(TRAIN, clip_value=0.5, clip_norm=1.0)

"""When a backward pass is computed in halves: only if torch's second half finds every gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from helpers.models.blocks import Block
from orchestrator.compat.pipelining import nodes_of
from orchestrator.strategies.pipelined.timed_stage import backward_splits


class Scaled(Block):
    """A scale of the first layer's output, which may be the second one's too."""

    def __init__(self, *, twice: bool) -> None:
        super().__init__()
        self.scale, self.twice = nn.Parameter(torch.ones(16)), twice

    def forward(self, h: Tensor) -> Tensor:
        out = self.l2(self.l1(h) * self.scale.exp())
        return out * self.scale if self.twice else out


@pytest.mark.parametrize(
    ("module", "splits"),
    [(Block(), True), (Scaled(twice=False), True), (Scaled(twice=True), False)],
    ids=["block", "scale", "scale used twice"],
)
def test_a_backward_pass_is_divided_if_each_parameter_contributes_at_one_node(module: nn.Module, splits: bool) -> None:
    h = torch.randn(4, 16, requires_grad=True)
    out = module(h)
    assert backward_splits(nodes_of([out]), nodes_of([h])) == splits

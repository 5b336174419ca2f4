"""A stage is built, and its cut measured, in about its share of the model's memory."""

import functools

import pytest
import torch
from torch import nn

from helpers.ranks.allocations import Allocations
from orchestrator.model.partial_init import build_fake
from orchestrator.model.precision import Precision
from orchestrator.model.stages.cut import Cut
from orchestrator.model.stages.layers import costs, flow
from orchestrator.model.stages.own_stages import build_stages, sequence_of

LAYERS, WIDTH, STAGES = 8, 64, 4
CPU = torch.device("cpu")


class NotByHand:
    def stages(self, model: nn.Module) -> None:
        """Leave the cutting to the strategy."""


def model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def stage(number: int) -> object:
    """As a worker builds it that also measures the layers."""
    inputs = torch.ones(2, WIDTH)
    sequence = sequence_of(build_fake(model, CPU), inputs, split=(), num_stages=2, job=NotByHand())
    values = flow(sequence, inputs, precision=Precision())
    fresh = sequence_of(build_fake(model, CPU), inputs, split=(), num_stages=2, job=NotByHand()).modules
    costs(fresh, values, inputs, precision=Precision(), loss=lambda out: out.square().mean())
    cut = Cut(tuple(range(0, LAYERS, LAYERS // STAGES)))
    layers = functools.partial(sequence.build_layers, model, seed=1)
    return build_stages(layers, sequence, values, cut, [number], precision=Precision())


@pytest.mark.slow
def test_the_memory_of_a_worker_is_about_its_share() -> None:
    whole = sum(parameter.nbytes for parameter in model().parameters())
    for number in (0, STAGES - 1):
        with Allocations() as seen:
            kept = stage(number)
        assert whole / STAGES <= seen.peak_bytes < whole / STAGES + 0.2 * whole, number
        del kept

"""When the gradients of a stage are summed over its replicas."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from helpers.files.golden import Golden
from helpers.models.blocks import Block
from helpers.ranks.launches import recorded
from orchestrator.compat.pipelining import computations, nodes_of
from orchestrator.planning.schedules import SCHEDULES
from orchestrator.strategies.measure.device import WaitTimer
from orchestrator.strategies.parts.timed_stage import backward_splits
from orchestrator.strategies.sums.of_stages import OfStages

WAITS = WaitTimer(torch.device("cpu"))


@pytest.fixture
def group(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    """A group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def parameters(count: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2)) for _ in range(count)]


def begun(sums: OfStages, passes: Sequence[int]) -> list[int]:
    """The sums that have begun after each of these backward passes, given by their stage, and at the end."""
    seen = []
    with recorded() as launches:
        for stage in passes:
            sums.passed(stage)
            seen.append(len(launches))
        sums.finish(WAITS)
    return [*seen, len(launches)]


def test_a_sum_begins_with_the_last_pass_of_its_stage(group: dist.ProcessGroup) -> None:
    first, second, frozen_input = parameters(3)
    first.grad = second.grad = torch.ones(2)
    frozen_input.grad = torch.ones(2)
    sums = OfStages(group, {0: [first], 1: [second], 2: [frozen_input]}, {})
    for _ in range(2):
        sums.begin_step(passes=2)
        assert begun(sums, [1, 0, 1, 0]) == [0, 0, 1, 2, 3], "no pass goes through stage 2"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_in_every_schedule_each_stage_has_a_last_pass_for_each_micro_batch(schedule: str) -> None:
    """A backward pass in halves counts with the second one, which computes the gradients of the parameters."""
    workers, microbatches = 2, 8
    orders = computations(schedule, workers, microbatches, SCHEDULES[schedule].stages_per_rank)
    passes = Counter((stage, number) for order in orders for kind, stage, number in order if kind in "BW")
    stages = {stage for stage, _ in passes}
    assert len(stages) == workers * SCHEDULES[schedule].stages_per_rank
    assert passes == Counter((stage, number) for stage in stages for number in range(microbatches))


def test_a_parameter_of_two_stages_is_summed_once_after_both(group: dist.ProcessGroup) -> None:
    (shared,) = parameters(1)
    shared.grad = torch.ones(2)
    sums = OfStages(group, {0: [shared], 3: [shared, shared]}, {})
    sums.begin_step(passes=1)
    assert begun(sums, [3, 0]) == [0, 1, 1]


def test_a_gradient_that_is_missing_is_named_before_the_replicas_wait_for_it(
    group: dist.ProcessGroup, golden: Golden
) -> None:
    used, unused, allowed = parameters(3)
    used.grad = torch.ones(2)
    sums = OfStages(group, {0: [used, unused, allowed]}, {used: "layer.used", unused: "layer.unused"})
    sums.begin_step(passes=1)
    with recorded() as launches, golden.raises(ValueError):
        sums.passed(0)
    assert launches == []


def test_gradients_of_any_layout_are_summed_where_they_are(group: dist.ProcessGroup) -> None:
    table = torch.arange(6.0).reshape(2, 3)
    gradients = [table.clone(), table.t().clone().t(), table.clone().to_sparse(), torch.empty(0), table.half()]
    own = [nn.Parameter(torch.zeros(g.shape, dtype=g.dtype)) for g in gradients]
    for parameter, gradient in zip(own, gradients, strict=True):
        parameter.grad = gradient
    sums = OfStages(group, {0: own}, {})
    sums.begin_step(passes=1)
    sums.passed(0)
    sums.finish(WAITS)
    for parameter, gradient in zip(own, gradients, strict=True):
        assert parameter.grad is gradient
        assert torch.equal(gradient.to_dense().float(), table if gradient.numel() else gradient)


# Backward passes in halves ------------------------------------------------------------------------


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

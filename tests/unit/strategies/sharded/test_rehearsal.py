"""What ``fsdp`` finds in a pass with fake tensors: weights that a model changes, or reads where they are parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from helpers.jobs.toys import Toy
from orchestrator.model.partial_init import build_fake
from orchestrator.model.precision import Precision
from orchestrator.strategies.sharded.rehearsal import check_forward
from orchestrator.strategies.sharded.wrapping import SeenCalls, Wrap
from orchestrator.user_code.errors import JobError


@torch.no_grad()
def in_place(layer: nn.Linear) -> None:
    layer.weight.clamp_(-0.05, 0.05)


def through_data(layer: nn.Linear) -> None:
    layer.weight.data.mul_(0.9)


def by_assignment(layer: nn.Linear) -> None:
    layer.weight.data = nn.functional.normalize(layer.weight.data)


def scale_of(layer: nn.Linear) -> float:
    return float(layer.weight.detach().abs().max() / torch.tensor(127.0))


class Block(nn.Module):
    def __init__(self, use: Callable[[nn.Linear], float | None]) -> None:
        super().__init__()
        self.layer, self.use = nn.Linear(10, 10), use

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).tanh() * (self.use(self.layer) or 1.0)


class Net(nn.Module):
    def __init__(self, inner: Callable[[nn.Linear], float | None], outer: Callable[[nn.Linear], float | None]) -> None:
        super().__init__()
        self.blocks, self.outer = nn.ModuleList(Block(inner) for _ in range(3)), outer
        self.head = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) * (self.outer(block.layer) or 1.0)  # type: ignore[arg-type]
        return self.head(x)


def nothing(layer: nn.Linear) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class Using(Toy):
    inner: Callable[[nn.Linear], float | None] = nothing
    outer: Callable[[nn.Linear], float | None] = nothing

    def model(self) -> nn.Module:
        return Net(self.inner, self.outer)


def check(job: Toy, wrap: Wrap = "auto") -> SeenCalls:
    whole = build_fake(job.model, torch.device("cpu"))
    return check_forward(job, whole, job.dataset("train"), precision=Precision.named("fp32", "cpu"), wrap=wrap)


@pytest.mark.parametrize("change", [in_place, through_data, by_assignment])
def test_a_forward_that_changes_weights_is_refused(change: Callable[[nn.Linear], None]) -> None:
    for job in (Using(inner=change), Using(outer=change)):
        with pytest.raises(JobError, match=r"forward\(\) changes blocks\.0\.layer\.weight, .*would be lost"):
            check(job)


def test_a_number_is_read_where_the_weight_is_whole() -> None:
    check(Using(inner=scale_of))
    for job in (Using(outer=scale_of), Using(inner=scale_of, outer=scale_of)):
        with pytest.raises(JobError, match=r"forward\(\) reads a number from blocks\.0\.layer\.weight.* outside"):
            check(job)


def test_numbers_of_the_batch_and_of_the_root_are_read_as_ever() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Reading(Using):
        def forward(self, model: Net, inputs: Tensor) -> Tensor:  # type: ignore[override]
            return model(inputs) * scale_of(model.head) * float(inputs.max())

    check(Using())
    check(Reading())


def test_the_order_of_calls_is_seen() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Twice(Using):
        def forward(self, model: Net, inputs: Tensor) -> Tensor:  # type: ignore[override]
            return model.head(model.blocks[0](model.blocks[2](model.blocks[0](inputs))))

    seen = check(Twice())
    assert seen.complete
    assert seen.inside == {"": ["blocks.0", "blocks.2", "blocks.0"], "blocks.0": [], "blocks.2": []}
    assert check(Using(), ("Linear",)).inside[""] == ["blocks.0.layer", "blocks.1.layer", "blocks.2.layer", "head"]


def test_a_pass_that_depends_on_numbers_is_not_seen_to_its_end() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Chosen(Using):
        def forward(self, model: Net, inputs: Tensor) -> Tensor:  # type: ignore[override]
            x = model.blocks[1](inputs)
            return model.head(model.blocks[2](x) if x.sum() > 0 else x)

    seen = check(Chosen())
    assert not seen.complete
    assert seen.inside[""] == ["blocks.1"]

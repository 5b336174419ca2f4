"""Blocks that are computed again in the backward pass."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from helpers.conformance.cases import having
from helpers.files.golden import Golden
from helpers.jobs.quick_jobs import digits
from jobs.gpt import GPT
from jobs.resnet50 import ResNet50
from orchestrator.model.repeated_blocks import Block as RepeatedBlock
from orchestrator.model.repeated_blocks import blocks_of, likeness, with_blocks
from orchestrator.strategies.transforms.blocks import blocks_note


class Block(nn.Module):
    """Two layers with dropout and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 32)
        self.norm = nn.BatchNorm1d(32)
        self.dropout = nn.Dropout(0.5)
        self.second = nn.Linear(32, 8)

    def forward(self, x: Tensor, *, factor: float = 1.0) -> Tensor:
        out: Tensor = self.second(self.dropout(self.norm(self.first(x)).relu()))
        return x + factor * out


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), *(Block() for _ in range(4)), nn.Linear(8, 3))


def trained(model: nn.Module) -> tuple[list[Tensor], list[Tensor], int]:
    """The gradients and the buffers after two passes, and the bytes that autograd kept for the first."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(2)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(inputs).square().mean()
    size_bytes = sum(kept.values())
    loss.backward(retain_graph=True)
    loss.backward()  # as a backward pass in halves, which recomputes twice
    model(inputs).square().mean().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return gradients, list(model.buffers()), size_bytes


def test_gradients_and_statistics_are_equal_and_less_is_kept() -> None:
    gradients, buffers, size_bytes = trained(build())
    recomputed = with_blocks(build, recomputes="blocks")()
    own_gradients, own_buffers, own_size_bytes = trained(recomputed)
    assert len(own_gradients) == len(gradients) == len(list(recomputed.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(own_gradients, gradients, strict=True)), "dropout should be repeated"
    assert all(torch.equal(a, b) for a, b in zip(own_buffers, buffers, strict=True))
    assert recomputed[1].norm.num_batches_tracked == 2
    assert own_size_bytes < size_bytes / 3


def test_selective_repeats_no_matrix_product_and_keeps_less_than_everything() -> None:
    inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))

    def measured(model: nn.Module) -> tuple[int, list[Tensor | None]]:
        torch.manual_seed(2)
        with FlopCounterMode(display=False) as counter:
            model(inputs).square().mean().backward()
        return counter.get_total_flops(), [p.grad for p in model.parameters()]

    flops, gradients = measured(build())
    selected, own_gradients = measured(with_blocks(build, recomputes="selective")())
    again, _ = measured(with_blocks(build, recomputes="blocks")())
    assert selected == flops < again
    assert all(torch.equal(a, b) for a, b in zip(own_gradients, gradients, strict=True)), "dropout should be repeated"


def test_a_model_looks_as_before() -> None:
    plain, recomputed = build(), with_blocks(build, recomputes="blocks")()
    assert repr(recomputed) == repr(plain)
    assert recomputed.state_dict().keys() == plain.state_dict().keys()
    assert isinstance(recomputed[1], Block)
    twin = copy.deepcopy(recomputed)
    with torch.no_grad():
        twin[1].second.weight.zero_()
    inputs = torch.ones(4, 8)
    torch.manual_seed(0)
    changed = twin(inputs)
    torch.manual_seed(0)
    assert not torch.equal(recomputed(inputs), changed), "the copy should use its own parameters"


class Nested(nn.Module):
    """A list of blocks in a body, and blocks in those."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"inner": build()}) for _ in range(2)])})


@pytest.mark.parametrize(
    ("model", "count"),
    [
        (lambda: build(), 4),
        (Nested, 2),
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)), 0),
        (lambda: Block(), 0),
        (GPT(layers=3).model, 3),
        (ResNet50().model, 16),
    ],
    ids=["sequential", "nested", "layers", "one-block", "gpt", "resnet50"],
)
def test_the_outermost_repeated_blocks_are_found(model, count: int) -> None:
    with torch.device("meta"):
        assert len(blocks_of(model())) == count


def test_a_model_without_blocks_is_noted(golden: Golden) -> None:
    train = having(activation_checkpointing="blocks")
    golden.says(blocks_note(digits().model(), train))
    golden.says(blocks_note(digits().model(), having(train, compile=True)))
    assert blocks_note(GPT(layers=2).model(), train) is None
    assert blocks_note(digits().model(), having()) is None


class Attributed(nn.Module):
    """Has attributes of common names, in its class and in itself, which its forward pass reads."""

    kind, recomputes = "pre-norm", 2.0

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.compiled = nn.Linear(4, 4), 3.0

    def around(self, x: Tensor) -> Tensor:
        return x * self.compiled

    def forward(self, x: Tensor) -> Tensor:
        return self.around(self.layer(x)) * (self.recomputes if self.kind == "pre-norm" else 0.0)


@pytest.mark.parametrize("recomputes", ["none", "blocks", "selective"])
def test_a_block_keeps_its_own_attributes(recomputes: Any) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(Attributed(), Attributed())

    x, model = torch.randn(2, 4), with_blocks(build, recomputes=recomputes)()
    assert torch.equal(model(x), build()(x))
    first, second = model.children()
    assert likeness(first) == likeness(second)


@pytest.mark.parametrize(
    ("compiles", "recomputes", "in_blocks"),
    [(False, "blocks", False), (True, "none", False), (True, "blocks", True), ("blocks", "none", True)],
)
def test_what_is_computed_again_is_compiled_block_by_block(compiles: Any, recomputes: Any, in_blocks: bool) -> None:
    assert having(compile=compiles, activation_checkpointing=recomputes).compiles_blocks == in_blocks


def test_blocks_are_alike_if_they_differ_only_in_numbers() -> None:
    model = with_blocks(build)()
    (first, second, third, fourth) = (block for block in model if isinstance(block, RepeatedBlock))
    second.dropout.p = 0.1
    third.first.weight.requires_grad_(False)
    assert likeness(first) == likeness(fourth)
    assert len({likeness(block) for block in (first, second, third, fourth)}) == 3

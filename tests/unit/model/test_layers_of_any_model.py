"""Into which layers a model is divided that is no Sequential, if the configuration does not name them."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.jobs.toys import Toy
from orchestrator.model.fake_calls import first_modules
from orchestrator.model.partial_init import build_fake
from orchestrator.model.precision import Precision
from orchestrator.model.stages.cut import Cut
from orchestrator.model.stages.layers import flow
from orchestrator.model.stages.own_stages import build_stages, sequence_of
from orchestrator.model.stages.sequence import LayerSequence
from orchestrator.strategies.parts.stage_builder import StageBuilder

CPU = torch.device("cpu")


class Blocks(nn.Module):
    def __init__(self, glue: Callable[[Tensor], Tensor] = torch.tanh):
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10)) for _ in range(4)])
        self.glue = glue

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.glue(layer(x))
        return x


class Headed(nn.Module):
    def __init__(self, blocks: nn.Module):
        super().__init__()
        self.body, self.head = blocks, nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class Wrapper(nn.Module):
    """Takes a dict of exactly two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Headed(Blocks())

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.model(batch["x"] + batch["y"])


class Borrowing(nn.Module):
    """Its last layer is called with what a part of the first one makes, as in the DiT of diffusers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(10, 10), nn.Tanh())
        self.second, self.head = nn.Linear(10, 10), nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.second(self.first(x))
        return self.head(hidden + self.first[0](x))


def test_layers_that_share_a_module_are_measured() -> None:
    inputs, target = torch.randn(4, 10), torch.arange(4)
    builder = StageBuilder.outline(
        Toy(build=Borrowing),
        inputs,
        target,
        constructor=Borrowing,
        split=(),
        num_stages=2,
        device=CPU,
        seed=3,
        precision=Precision(),
    )
    assert len(builder.sequence.names) == len(builder.measure_costs()) == 3


def depends_on_values(x: Tensor) -> Tensor:
    return x if float(x.sum()) > 0 else -x


def layers_of(build: Callable[[], nn.Module], *, num_stages: int, inputs: Any = None) -> LayerSequence:
    inputs = torch.randn(4, 10) if inputs is None else inputs
    return sequence_of(build_fake(build, CPU), inputs, split=(), num_stages=num_stages, job=Toy(build=build))


def test_modules_larger_than_a_stage_are_divided() -> None:
    blocks = [f"body.layers.{i}" for i in range(4)]
    assert layers_of(lambda: Headed(Blocks()), num_stages=2).names == (*blocks, "head")
    parts = [f"{block}.{j}" for block in blocks for j in range(2)]
    assert layers_of(lambda: Headed(Blocks()), num_stages=6).names == (*parts, "head")


def test_a_wrapper_is_no_layer() -> None:
    inputs = {"x": torch.randn(4, 10), "y": torch.randn(4, 10)}
    names = layers_of(Wrapper, num_stages=2, inputs=inputs).names
    assert names == (*(f"model.body.layers.{i}" for i in range(4)), "model.head")


def test_a_sequential_with_fewer_children_than_stages_is_divided_further() -> None:
    def build() -> nn.Module:
        return nn.Sequential(Blocks(), nn.Linear(10, 4))

    assert layers_of(build, num_stages=2).names == ("0", "1")
    assert layers_of(build, num_stages=3).names == (*(f"0.layers.{i}" for i in range(4)), "1")


def test_a_module_whose_code_cannot_be_recorded_stays_in_one_piece() -> None:
    assert layers_of(lambda: Headed(Blocks(depends_on_values)), num_stages=2).names == ("body", "head")


def test_too_few_layers_without_it_are_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match=r"Blocks body: its forward\(\) reads the values of a tensor .*Job\.stages"):
        layers_of(lambda: Headed(Blocks(depends_on_values)), num_stages=3)


class Failing(Borrowing):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError(f"no batches of {len(super().forward(x))}")


def test_a_model_that_cannot_be_called_keeps_no_hooks() -> None:
    whole = build_fake(Failing, CPU)
    with pytest.raises(ValueError, match="no batches of 4"):
        first_modules(whole, torch.randn(4, 10), ())
    assert not any(module._forward_pre_hooks for module in whole.model.modules())


class SelectsByValue(nn.Module):
    """The shape of a result between its layers depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(10, 10), nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.second(hidden[(hidden[:, 0] > -100).nonzero().flatten()])


def test_code_that_needs_values_is_refused_by_its_name() -> None:
    with pytest.raises(
        ValueError, match=r"SelectsByValue: its forward\(\) fails with tensors that have a shape and no"
    ):
        layers_of(SelectsByValue, num_stages=2)


@pytest.mark.parametrize("passes_on", [nn.Identity, nn.Flatten, lambda: nn.Dropout(0.0)])
def test_a_stage_may_change_its_input_behind_a_layer_that_passes_it_on(passes_on: Callable[[], nn.Module]) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(10, 10), passes_on(), nn.ReLU(inplace=True), nn.Linear(10, 4))

    inputs, precision = torch.randn(2, 10), Precision.named("fp32", "cpu")
    sequence = layers_of(build, num_stages=2, inputs=inputs)
    values = flow(sequence, inputs, precision=precision)
    cut = Cut(starts=(0, 1))
    layers = functools.partial(sequence.build_layers, build, seed=0)
    (stage,) = build_stages(layers, sequence, values, cut, own=[1], precision=precision)
    received = torch.randn(2, 10, requires_grad=True)
    before = received.detach().clone()
    stage.module(received).sum().backward()
    assert torch.equal(received, before)
    assert received.grad is not None

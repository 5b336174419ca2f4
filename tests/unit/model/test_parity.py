"""Pieces that would train in another way than the whole model are found, whether it fits into memory or not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from helpers.special_modules import SPECIAL, Model, _DoubledGradient, model_with
from helpers.stage_toys import Chain, plain
from orchestrator.compat.torch import FakeTensor
from orchestrator.job import Job
from orchestrator.model.parity import Verdict, compare
from orchestrator.model.precision import Precision
from orchestrator.model.sequence import LayerSequence
from orchestrator.model.stages import sequence_of
from orchestrator.strategies.pipelined.stage_builder import StageBuilder

CPU = torch.device("cpu")
PLENTY = 10**12
INPUTS, TARGET = torch.randn(6, 10, generator=torch.Generator().manual_seed(1)), torch.arange(6) % 4


def linear() -> nn.Module:
    return nn.Linear(16, 16)


class Plain(Model):
    """A model whose pieces are as they should be."""

    def __init__(self) -> None:
        super().__init__(linear)


class CustomFunctionInGlue(Plain):
    """Its own ``forward`` applies a custom function, whose backward pass a recording does not have."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.third(_DoubledGradient.apply(self.special(self.first(x)))))
        return out


class CountsInGlue(Plain):
    """Its own ``forward`` counts calls, which a recording does not, and keeps the count where nobody sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = numpy.zeros(1)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.head(self.third(F.relu(self.special(self.first(x))) * float(self.calls[0])))
        return out


class HandCut(Chain):
    def stages(self, model: nn.Module) -> list[nn.Module]:
        assert isinstance(model, Plain)
        return [
            nn.Sequential(model.first, nn.Tanh(), Shift(model)),
            nn.Sequential(model.special, model.third, model.head),
        ]


class Shift(nn.Module):
    def __init__(self, model: Plain):
        super().__init__()
        self.shift = model.shift

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


class EvaluatesOtherwise(Plain):
    """Looks at something in evaluation that a recording, which is made with gradients, does not have."""

    def forward(self, x: Tensor) -> Tensor:
        factor = 1.0 if torch.is_grad_enabled() else 2.0
        out: Tensor = self.head(self.third(self.special(self.first(x)) * factor))
        return out


def verdict(build: Callable[[], nn.Module], free_bytes: int, job: Job | None = None) -> Verdict:
    job = job or Chain(build=build)
    return compared(
        build, sequence_of(build, INPUTS, CPU, split=("third",), num_stages=2, job=job), free_bytes=free_bytes
    )


def compared(build: Callable[[], nn.Module], sequence: LayerSequence, *, free_bytes: int) -> Verdict:
    return compare(
        build,
        sequence,
        INPUTS,
        lambda output: F.cross_entropy(output, TARGET),
        device=CPU,
        seed=3,
        precision=Precision(),
        free_bytes=free_bytes,
    )


def too_little(build: Callable[[], nn.Module]) -> int:
    """Memory for less than two copies of the model, and for any of its layers."""
    return 4 * sum(p.nbytes for p in build().parameters()) - 1


@pytest.mark.parametrize("name", SPECIAL)
def test_modules_that_run_as_they_are_are_equal(name: str) -> None:
    build = functools.partial(model_with, name)
    found = verdict(build, too_little(build))
    assert found.error is None
    assert found.note is not None
    assert "were compared with the whole model layer by layer and with random parameters: two copies" in found.note


@pytest.mark.parametrize("fits", [True, False], ids=["in-memory", "layer-by-layer"])
@pytest.mark.parametrize(
    ("build", "said"),
    [
        (CustomFunctionInGlue, "the gradient of special."),
        (CountsInGlue, "the loss of the pieces is "),
        (EvaluatesOtherwise, "in evaluation, the loss of the pieces is "),
    ],
)
def test_a_difference_is_found(build: Callable[[], nn.Module], said: str, fits: bool) -> None:
    error = verdict(build, PLENTY if fits else too_little(build)).error
    assert error is not None
    assert error.startswith(said)
    if build is CountsInGlue and not fits:
        assert error.endswith("; the first layer that is called with other values is third")


@pytest.mark.parametrize("fits", [True, False], ids=["in-memory", "layer-by-layer"])
def test_a_cut_by_hand_that_forgets_something_is_found(fits: bool) -> None:
    error = verdict(Plain, PLENTY if fits else too_little(Plain), HandCut(build=Plain)).error
    assert error is not None
    assert "the loss of the pieces is" in error


class Watched(nn.Linear):
    """Notes the largest number of weights of its kind that have memory at once."""

    seen: list[StorageWeakRef] = []  # noqa: RUF012
    most = 0

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(x, FakeTensor):
            self.seen.append(StorageWeakRef(self.weight.untyped_storage()))
            Watched.most = max(Watched.most, len({weight.cdata for weight in self.seen if not weight.expired()}))
        return super().forward(x)


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Watched(10, 10) for _ in range(8)])
        self.third = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        out: Tensor = self.third(x)
        return out


@pytest.mark.parametrize(("fits", "at_once"), [(False, 1), (True, 16)])
def test_one_layer_at_a_time_has_memory(fits: bool, at_once: int) -> None:
    free_bytes = PLENTY if fits else too_little(Deep)
    Watched.seen.clear()
    Watched.most = 0
    assert verdict(Deep, free_bytes).error is None
    # Whole and in pieces: two passes and an evaluation. A layer is called again in a backward pass.
    assert len(Watched.seen) == 8 * 2 * (3 if fits else 5)
    assert Watched.most == at_once


class ChangesInput(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(2))


def changes_input() -> nn.Module:
    return Model(lambda: ChangesInput(16, 16))


@pytest.mark.parametrize(
    ("build", "free_bytes", "said"),
    [
        (Plain, 100, "and its largest layer needs"),
        (changes_input, None, "layer by layer it is impossible (NotStreamableError: special changes what it is called"),
    ],
)
def test_what_is_not_compared_is_said(build: Any, free_bytes: int | None, said: str) -> None:
    found = verdict(build, too_little(build) if free_bytes is None else free_bytes)
    assert found.error is None
    assert found.note is not None
    assert found.note.startswith("the stages were not compared with the whole model: two copies of the model with grad")
    assert said in found.note


def test_the_check_before_training_refuses_also_with_little_memory() -> None:
    builder = StageBuilder.outline(
        Chain(build=CustomFunctionInGlue),
        INPUTS,
        TARGET,
        constructor=CustomFunctionInGlue,
        split=("third",),
        num_stages=2,
        device=CPU,
        seed=3,
        precision=Precision(),
    )
    with pytest.raises(
        ValueError, match=r"would not train as the whole model does: the gradient of special\..*Job.stages"
    ):
        builder.check_parity(free_bytes=too_little(CustomFunctionInGlue))


def test_with_memory_for_all_of_it_nothing_is_noted() -> None:
    assert verdict(Plain, PLENTY) == Verdict()


def test_of_a_sequence_that_only_calls_its_layers_nothing_has_to_be_compared() -> None:
    sequence = sequence_of(plain, INPUTS, CPU, split=(), num_stages=2, job=Chain(build=plain))
    assert compared(plain, sequence, free_bytes=0) == Verdict()

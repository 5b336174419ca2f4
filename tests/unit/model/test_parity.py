"""Pieces that would train in another way than the whole model are found; without memory for that, the user is told."""

import functools
from collections.abc import Callable, Iterator

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from helpers.jobs.special_modules import SPECIAL, Model, _DoubledGradient, model_with
from helpers.jobs.stage_toys import plain
from helpers.jobs.toys import Toy
from orchestrator.job import Job
from orchestrator.model.parity import ParityResult, compare
from orchestrator.model.partial_init import build_fake
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
        return self.head(self.third(_DoubledGradient.apply(self.special(self.first(x)))))


class CountsInGlue(Plain):
    """Its own ``forward`` counts calls, which a recording does not, and keeps the count where nobody sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = numpy.zeros(1)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.head(self.third(F.relu(self.special(self.first(x))) * float(self.calls[0])))


class HandCut(Toy):
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
        return self.head(self.third(self.special(self.first(x)) * factor))


class Prepared(nn.Linear):
    """Works only once the model has set it up."""

    ready = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            raise ValueError("not ready")
        return super().forward(x)


class PreparesALayer(Model):
    """Sets up a layer in its first pass, as BigBird chooses its attention, before it is recorded."""

    def __init__(self) -> None:
        super().__init__(lambda: Prepared(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        self.special.ready = True
        return super().forward(x)


def verdict(build: Callable[[], nn.Module], free_bytes: int, job: Job | None = None) -> ParityResult:
    job = job or Toy(build=build)
    return compared(
        build,
        sequence_of(build_fake(build, CPU), INPUTS, split=("third",), num_stages=2, job=job),
        free_bytes=free_bytes,
    )


def compared(build: Callable[[], nn.Module], sequence: LayerSequence, *, free_bytes: int) -> ParityResult:
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
    """Memory for less than two copies of the model with gradients."""
    return 4 * sum(p.nbytes for p in build().parameters()) - 1


@pytest.mark.parametrize("name", SPECIAL)
def test_modules_that_run_as_they_are_are_equal(name: str) -> None:
    build = functools.partial(model_with, name)
    assert verdict(build, PLENTY) == ParityResult()


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (CustomFunctionInGlue, "the gradient of special."),
        (CountsInGlue, "the loss of the pieces is "),
        (PreparesALayer, "the pieces fail (ValueError: not ready), and the whole model does not"),
        (EvaluatesOtherwise, "in evaluation, the loss of the pieces is "),
    ],
)
def test_a_difference_is_found(build: Callable[[], nn.Module], said: str) -> None:
    error = verdict(build, PLENTY).error
    assert error.startswith(said)


def test_a_cut_by_hand_that_forgets_something_is_found() -> None:
    error = verdict(Plain, PLENTY, HandCut(build=Plain)).error
    assert "the loss of the pieces is" in error


def test_without_memory_for_two_copies_a_note_says_that_nothing_was_compared() -> None:
    found = verdict(CustomFunctionInGlue, too_little(CustomFunctionInGlue))
    assert found.error is None
    assert found.note.startswith("the stages were not compared with the whole model: two copies of the model with grad")
    assert "a smaller variant of the model" in found.note


class Unlabelled(Toy):
    """The samples have no labels, so that the loss is NaN."""

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return super().loss(output, target) * 0 / 0

    def weight(self, target: Tensor) -> Tensor:
        return torch.zeros(())


@pytest.mark.parametrize("job", [Toy(build=CustomFunctionInGlue), Unlabelled(build=CustomFunctionInGlue)])
def test_the_check_before_training_refuses(job: Job) -> None:
    builder = StageBuilder.outline(
        job,
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
        builder.check_parity(free_bytes=PLENTY)


def test_of_a_sequence_that_only_calls_its_layers_nothing_has_to_be_compared() -> None:
    sequence = sequence_of(build_fake(plain, CPU), INPUTS, split=(), num_stages=2, job=Toy(build=plain))
    assert compared(plain, sequence, free_bytes=0) == ParityResult()


class Doubles(nn.Sequential):
    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = super().__call__(x)
        return out * 2


class Decorated(nn.Sequential):
    """A recording has no autocast."""

    forward = torch.autocast("cpu", torch.bfloat16)(nn.Sequential.forward)


class ActsOften(nn.Sequential):
    def __iter__(self) -> Iterator[nn.Module]:
        return (layer for child in super().__iter__() for layer in [child] * (1 + isinstance(child, nn.Tanh)))


def sequence_in(build: Callable[[], nn.Module]) -> LayerSequence:
    return sequence_of(build_fake(build, CPU), INPUTS, split=(), num_stages=2, job=Toy(build=build))


@pytest.mark.parametrize("kind", [Doubles, ActsOften])
def test_the_pieces_of_a_sequence_do_what_its_own_call_adds(kind: Callable[..., nn.Module]) -> None:
    def build() -> nn.Module:
        return kind(*plain())

    sequence = sequence_in(build)
    assert not sequence.trains_as_the_whole
    assert compared(build, sequence, free_bytes=PLENTY) == ParityResult()


def test_a_sequence_that_changes_its_precision_is_refused() -> None:
    def build() -> nn.Module:
        return Decorated(*plain())

    error = compared(build, sequence_in(build), free_bytes=PLENTY).error
    assert error.startswith("the loss of the pieces is")

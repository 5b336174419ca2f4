"""The pieces of a model train as the whole model does, because its modules run as they are."""

import functools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from helpers.jobs.special_modules import SPECIAL, model_with
from helpers.jobs.stage_toys import plain
from helpers.jobs.toys import Toy
from helpers.jobs.unrecorded import CustomFunctionInGlue
from helpers.models.pieces import difference
from orchestrator.model.partial_init import build_fake
from orchestrator.model.stages.own_stages import sequence_of

CPU = torch.device("cpu")
INPUTS, TARGET = torch.randn(6, 10, generator=torch.Generator().manual_seed(1)), torch.arange(6) % 4


def found(build: Callable[[], nn.Module], *split: str) -> str | None:
    sequence = sequence_of(build_fake(build, CPU), INPUTS, split=split, num_stages=2, job=Toy(build=build))
    return difference(build, sequence, INPUTS, lambda output: F.cross_entropy(output, TARGET))


@pytest.mark.parametrize("name", SPECIAL)
def test_modules_that_run_as_they_are_are_equal(name: str) -> None:
    assert found(functools.partial(model_with, name), "third") is None


def test_a_difference_would_be_found() -> None:
    assert found(CustomFunctionInGlue, "third") is not None


class Doubles(nn.Sequential):
    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = super().__call__(x)
        return out * 2


class ActsOften(nn.Sequential):
    def __iter__(self) -> Iterator[nn.Module]:
        return (layer for child in super().__iter__() for layer in [child] * (1 + isinstance(child, nn.Tanh)))


@pytest.mark.parametrize("kind", [Doubles, ActsOften])
def test_the_pieces_of_a_sequence_do_what_its_own_call_adds(kind: Callable[..., nn.Module]) -> None:
    assert found(lambda: kind(*plain())) is None

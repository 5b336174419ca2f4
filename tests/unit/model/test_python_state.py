"""Code between layers that remembers its calls is not recorded, wherever it keeps the memory."""

import itertools
from collections.abc import Callable, Iterator
from types import MethodType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from helpers.jobs.toys import Toy
from orchestrator.model.partial_init import build_fake
from orchestrator.model.stages.own_stages import sequence_of

CALLS = {"number": 0}
steps_done = 0


def warm_up() -> float:
    """Behaves otherwise from the hundredth call on, which no comparison of the first ones shows."""
    global steps_done
    steps_done += 1
    return 1.0 if steps_done < 100 else 0.5


class Glue(nn.Module):
    """Layers with code between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(10, 16), nn.Linear(16, 4)

    def factor(self) -> float:
        return 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)) * self.factor())


class InAnAttribute(Glue):
    calls = 0

    def factor(self) -> float:
        self.calls += 1
        return 1.0


class InAnObject(Glue):
    def __init__(self) -> None:
        super().__init__()
        self.schedule = SimpleNamespace(history={"steps": [0]})

    def factor(self) -> float:
        self.schedule.history["steps"][0] += 1
        return 1.0


class InItsClass(Glue):
    calls: ClassVar[int] = 0

    def factor(self) -> float:
        InItsClass.calls += 1
        return 1.0


class InADictOfTheModule(Glue):
    def factor(self) -> float:
        CALLS["number"] += 1
        return 1.0


class InAGlobalOfAFunction(Glue):
    def factor(self) -> float:
        return warm_up()


class InAnIterator(Glue):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = itertools.count()

    def factor(self) -> float:
        return 1.0 if next(self.numbers) < 50 else 0.5


class InAGenerator(Glue):
    def __init__(self) -> None:
        super().__init__()
        self.factors = self._factors()

    def _factors(self) -> Iterator[float]:
        for number in range(10**9):
            yield 1.0 if number < 50 else 0.5

    def factor(self) -> float:
        return next(self.factors)


def in_a_closure() -> nn.Module:
    model, calls = Glue(), 0

    def forward(self: Any, x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return Glue.forward(self, x)

    model.forward = MethodType(forward, model)  # type: ignore[method-assign]
    return model


def in_a_hook() -> nn.Module:
    model, calls = Glue(), [0]

    def hook(module: nn.Module, args: Any) -> None:
        calls[0] += 1

    model.register_forward_pre_hook(hook)
    return model


class SetsOnce(Glue):
    """Keeps what its first call finds out."""

    size: int | None = None

    def factor(self) -> float:
        self.size = 3 if self.size is None else self.size
        return 1.0


def recorded(build: Callable[[], nn.Module]) -> None:
    sequence_of(
        build_fake(build, torch.device("cpu")),
        torch.randn(4, 10),
        split=("second",),
        num_stages=2,
        job=Toy(build=build),
    )


@pytest.mark.parametrize(
    ("build", "where"),
    [
        (InAnAttribute, "calls"),
        (InAnObject, "schedule.history.steps.0"),
        (InItsClass, "InItsClass.calls"),
        (InADictOfTheModule, "test_python_state.CALLS.number"),
        (InAGlobalOfAFunction, "test_python_state.steps_done"),
        (InAnIterator, "numbers"),
        (InAGenerator, "factors.number"),
        (in_a_closure, "test_python_state.calls"),
        (in_a_hook, "test_python_state.calls.0"),
    ],
)
def test_memory_of_the_code_between_layers_is_found(build: Callable[[], nn.Module], where: str) -> None:
    with pytest.raises(ValueError, match=rf": each forward pass changes \S*{where}, and a recorded one would not"):
        recorded(build)


@pytest.mark.parametrize("build", [Glue, SetsOnce])
def test_code_without_memory_is_recorded(build: Callable[[], nn.Module]) -> None:
    recorded(build)

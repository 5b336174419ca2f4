"""Errors in code of libraries: the call of the user's model or job that has led to each is named, with its inputs."""

import copy
import inspect
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from orchestrator import Job
from orchestrator.model.failed_call import failed_call


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(5, 1))
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, *, scaled: bool = False) -> Tensor:
        return x * self.scale if scaled else self.body(x)


class Talkative(nn.Linear):
    def extra_repr(self) -> str:
        raise KeyError("of the user")


@dataclass(frozen=True, kw_only=True)
class Losses(Job):
    def model(self) -> nn.Module:
        return Block()

    def dataset(self, split: str) -> Any:
        return []

    def optimizer(self, parameters: Any) -> Any:
        return torch.optim.SGD(parameters)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return torch.ones(())


@dataclass(frozen=True, kw_only=True)
class Functional(Losses):
    loss = staticmethod(F.cross_entropy)


@dataclass(frozen=True, kw_only=True)
class Criterion(Losses):
    loss = staticmethod(nn.CrossEntropyLoss())


NESTED = nn.Sequential(nn.Linear(2, 4), nn.Sequential(nn.ReLU(), nn.Linear(5, 1)))


@dataclass(frozen=True, kw_only=True)
class Plain(Losses):
    def model(self) -> nn.Module:
        return NESTED


@dataclass(frozen=True, kw_only=True)
class Wide(Losses):
    def model(self) -> nn.Module:
        return nn.Linear(5, 1)


X, BUILT, LINE = torch.ones(8, 2), Plain().model(), inspect.getsourcelines(Plain.model)[1]
LINEAR = "Linear(in_features=5, out_features=1, bias=True), given float32 [8, 4]"
WRONG = torch.ones(8, 3), torch.ones(8, 1)
CASES: dict[str, tuple[Any, str]] = {
    "a container": (lambda: copy.deepcopy(NESTED)(X), f"in module '1.1': {LINEAR}"),
    "a container of a job": (
        lambda: BUILT(X),
        f"in module '1.1' of Plain.model(), test_failed_call.py:{LINE}: {LINEAR}",
    ),
    "a model of a job": (lambda: Wide().model()(X), f"in Wide.model(), test_failed_call.py:{LINE + 6}: Linear("),
    "a module of a job below a method of the user": (
        lambda: Losses().model()(X),
        f"else self.body(x); in module 'body.2' of Losses.model(): {LINEAR}",
    ),
    "below a method of the user": (lambda: Block()(X), f"; in module 'body.2': {LINEAR}"),
    "of another type": (lambda: nn.Linear(5, 1)(X.long()), f"in {LINEAR}".replace("float32 [8, 4]", "int64 [8, 2]")),
    "by a name": (lambda: nn.Bilinear(2, 2, 1)(X, input2=torch.ones(8, 3)), "given float32 [8, 2], float32 [8, 3]"),
    "that cannot be described": (lambda: Talkative(5, 1)(X), "in Talkative(), given float32 [8, 2]"),
    "a function as the loss": (lambda: Functional().loss(*WRONG), "in Functional.loss"),
    "a module as the loss": (
        lambda: Criterion().loss(*WRONG),
        "in Criterion.loss: CrossEntropyLoss(), given float32 [8, 3], float32 [8, 1]",
    ),
    "an attention": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2)(torch.ones(1, 3, 5)),
        "in module 'layers.0.self_attn': ",
    ),
}  # fmt: skip


def raised_in_package(call: Any) -> BaseException:
    """Return the error of a call, with the frames from the model on, as if this package had made the call."""
    with pytest.raises(Exception) as raised:  # noqa: PT011 - whatever it is
        call()
    error, entry = raised.value, raised.value.__traceback__
    while entry is not None and entry.tb_frame.f_code is not call.__code__:
        entry = entry.tb_next
    return error.with_traceback(entry.tb_next)


@pytest.mark.parametrize("case", CASES)
def test_the_call_that_has_led_to_an_error_is_named_with_what_it_was_given(case: str) -> None:
    call, place = CASES[case]
    found = failed_call(raised_in_package(call))
    assert place in found.place
    assert found.comes_again
    assert 1 <= found.frames.count("File ") <= 3


def test_a_line_of_the_user_below_the_call_says_more_than_the_call() -> None:
    found = failed_call(raised_in_package(lambda: Block()(X, scaled=True)))
    assert found.place.endswith("return x * self.scale if scaled else self.body(x)")

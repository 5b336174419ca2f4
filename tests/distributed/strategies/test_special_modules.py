"""Modules that a tracer would change train in stages as they do alone, or are refused; none differs in silence."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from helpers.conformance.cases import Case, having
from helpers.conformance.layouts import MODEL_PARALLEL, SGD, ddp_pipeline, pipeline
from helpers.conformance.training import losses, train
from helpers.jobs.special_modules import ROOTS, SPECIAL, Model, Teacher, model_with
from helpers.jobs.toys import Toy
from helpers.ranks.gang import Gang
from helpers.records.runs import in_campaign
from orchestrator.config import schema

LAYOUTS: dict[str, tuple[schema.StrategyConfig, int]] = {
    "ddp_pipeline": (ddp_pipeline("GPipe", 1, split=("third",)), 4),
    "model_parallel": (replace(MODEL_PARALLEL, split=("third",)), 2),
    "pipeline": (pipeline("1F1B", 2, ("special",)), 2),
}
# What is called with micro-batches of its own changes state more often than with whole batches.
ONCE_A_STEP = {"moving average", "branch on values"}


@pytest.mark.in_turn
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", [*[*SPECIAL][::2], *in_campaign(*[*SPECIAL][1::2])])
def test_a_special_module_trains_as_it_does_alone(gang: Gang, name: str, layout: str) -> None:
    if (name, layout) == ("branch on values", "ddp_pipeline"):
        pytest.skip("each replica branches on its own samples")
    options, world_size = LAYOUTS[layout]
    slices = 2 if layout == "pipeline" else 1
    case = Case(job=Toy(build=functools.partial(model_with, name)), train=having(steps=6, global_batch_size=16))
    alone_case = replace(case, train=replace(case.train, grad_accumulation=slices if name in ONCE_A_STEP else 1))
    (alone,) = gang.run(train, alone_case, world_size=1)
    ranks = gang.run(train, replace(case, options=options), world_size=world_size)
    assert losses([alone])[-1] < losses([alone])[0]
    torch.testing.assert_close(losses(ranks), losses([alone]), rtol=SGD, atol=0)


class CustomFunctionInGlue(Model):
    """Its own ``forward`` applies a custom function, which cannot be recorded."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.Linear(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        from helpers.jobs.special_modules import _DoubledGradient

        return self.head(self.third(_DoubledGradient.apply(self.special(self.first(x)))))


class CountsInGlue(Model):
    """Its own ``forward`` counts calls, which would be forgotten."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.Linear(16, 16))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.head(self.third(F.relu(self.special(self.first(x))) * self.calls))


class WarmsUp(Model):
    """Its own ``forward`` behaves otherwise after some steps, which no comparison of the first ones shows."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.Linear(16, 16))
        self.schedule = SimpleNamespace(step=0)

    def forward(self, x: Tensor) -> Tensor:
        self.schedule.step += 1
        return super().forward(x) * (1.0 if self.schedule.step < 100 else 0.5)


class DifferentiatesInGlue(Model):
    """Its own ``forward`` computes a gradient, as for a penalty."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.Linear(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            hidden = self.first(x)
            out = self.third(self.special(hidden).tanh())
            (slopes,) = torch.autograd.grad(out.sum(), hidden, create_graph=True)
        return self.head(out * slopes)


class CalledThrice(nn.Module):
    """As for a triplet loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) + self.net(2 * x) + self.net(3 * x)


class CarriesState(Model):
    """Keeps a state from batch to batch."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.Linear(16, 16))
        self.state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.special(self.first(x)) + (0.0 if self.state is None else self.state)
        self.state = hidden.detach()
        return self.head(self.third(hidden))


class GivesALayer(Model):
    """Calls a layer with another one, of which it uses the weights, as Perceiver does."""

    class Reuse(nn.Module):
        def forward(self, x: Tensor, layer: nn.Linear) -> Tensor:
            return F.linear(x, layer.weight)

    def __init__(self) -> None:
        super().__init__(self.Reuse)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.special(self.third(self.first(x)).tanh(), self.third))


@dataclass
class Hidden:
    value: Tensor


class PassesADataclass(Model):
    """Its layers pass on a dataclass that torch does not know."""

    class Wrap(nn.Module):
        def forward(self, x: Tensor) -> Hidden:
            return Hidden(x)

    class Unwrap(nn.Linear):
        def forward(self, hidden: Hidden) -> Tensor:  # type: ignore[override]
            return super().forward(hidden.value)

    def __init__(self) -> None:
        super().__init__(self.Wrap)
        self.third = self.Unwrap(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.third(self.special(self.first(x))))


def scripted_root() -> nn.Module:
    return torch.jit.script(nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 4)))  # type: ignore[no-untyped-call,no-any-return]


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (CalledThrice, "CalledThrice: its forward() calls no layer exactly once"),
        (scripted_root, "RecursiveScriptModule: its forward() calls no layer exactly once"),
        (CarriesState, "keeps tensors for its next call, put it into an nn.Module"),
        (PassesADataclass, "the arguments of third: the dataclass Hidden holds tensors"),
        (GivesALayer, "the arguments of special: a Linear is passed on"),
        (CustomFunctionInGlue, "another model. Of 16 samples"),
        (DifferentiatesInGlue, "DifferentiatesInGlue: its forward() computes a gradient outside of the layers"),
        (CountsInGlue, "CountsInGlue: each forward pass changes calls"),
        (WarmsUp, "WarmsUp: each forward pass changes schedule.step"),
    ],
)
def test_glue_that_a_recording_changes_is_refused(gang: Gang, build: Any, said: str) -> None:
    options = replace(LAYOUTS["pipeline"][0], split="auto")
    case = Case(job=Toy(build=build), train=having(steps=2, global_batch_size=16, check="always"), options=options)
    answers = gang.ask(train, case, world_size=2)
    assert said in str(answers[0].error)
    assert "Job.stages" in str(answers[0].error)


@pytest.mark.in_turn
@pytest.mark.parametrize("name", ROOTS)
@pytest.mark.parametrize("layout", ["model_parallel", "pipeline"])
def test_a_root_that_is_more_than_a_list_of_layers(gang: Gang, name: str, layout: str) -> None:
    """Its own ``forward``, hooks and parameters are part of the model, wherever it is cut."""
    options, world_size = LAYOUTS[layout]
    case = Case(job=Toy(build=ROOTS[name]), train=having(steps=4, global_batch_size=16))
    (alone,) = gang.run(train, case, world_size=1)
    ranks = gang.run(train, replace(case, options=replace(options, split="auto")), world_size=world_size)
    torch.testing.assert_close(losses(ranks), losses([alone]), rtol=SGD, atol=0)
    assert {name for rank in ranks for name in rank.model} == set(alone.model)


@pytest.mark.parametrize("through_data", [False, True])
def test_a_frozen_layer_that_the_forward_pass_changes_elsewhere_is_refused(gang: Gang, through_data: bool) -> None:
    options = replace(LAYOUTS["model_parallel"][0], split=("middle",))
    job = Toy(build=functools.partial(Teacher, through_data=through_data))
    answers = gang.ask(train, Case(job=job, train=having(steps=4), options=options), world_size=2)
    assert "forward passes change" in str(answers[0].error)


class TwoHalves(nn.Module):
    """A forward pass that no tool can cut: a loop whose length depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(10, 16), nn.Tanh())
        self.decoder = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(1 + int(x.sum() > 1e9)):
            x = self.encoder(x)
        return self.decoder(x)


@dataclass(frozen=True, kw_only=True)
class CutByHand(Toy):
    build: Callable[[], nn.Module] = TwoHalves

    def stages(self, model: nn.Module) -> list[nn.Module]:
        assert isinstance(model, TwoHalves)
        return [model.encoder, *model.decoder]


@pytest.mark.parametrize("layout", ["pipeline", "ddp_pipeline"])
def test_a_job_cuts_its_model_by_hand(gang: Gang, layout: str) -> None:
    options, world_size = LAYOUTS[layout]
    split = ("decoder.2",) if layout == "pipeline" else ("decoder.0",)
    case = Case(job=CutByHand(), train=having(steps=6, global_batch_size=16), options=replace(options, split=split))
    (alone,) = gang.run(train, case, world_size=1)
    ranks = gang.run(train, case, world_size=world_size)
    torch.testing.assert_close(losses(ranks), losses([alone]), rtol=SGD, atol=0)
    whole: dict[str, Tensor] = {}
    for rank in ranks:
        whole |= rank.model
    torch.testing.assert_close(whole, alone.model, rtol=100 * SGD, atol=10 * SGD)


def test_without_it_the_message_says_what_to_write(gang: Gang) -> None:
    case = Case(job=Toy(build=TwoHalves), train=having(steps=2), options=LAYOUTS["pipeline"][0])
    answers = gang.ask(train, replace(case, options=replace(case.options, split="auto")), world_size=2)
    assert "its forward() reads the values of a tensor (__int__) outside of the layers" in str(answers[0].error)
    assert "Job.stages" in str(answers[0].error)

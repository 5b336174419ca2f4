"""Calls of a job that may look at the model: what they leave as it was, and what they may not change."""

import re
from collections.abc import Callable

import pytest
import torch
from torch import nn

from helpers.conformance.training import CPU
from orchestrator.worker.reports.evaluation import ModelChangedError, call_without_effect, error_with_place


def model() -> nn.Module:
    made = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    made[3].tied = made[0].weight
    made[1].eval()  # frozen, as some models are during training
    return made


def call(function: Callable[[nn.Module], object], on: nn.Module) -> object:
    return call_without_effect(lambda: function(on), method="job.on_step_end", model=on, device=CPU)


def test_random_numbers_modes_and_gradients_are_as_before() -> None:
    whole = model()
    modes = [module.training for module in whole.modules()]

    def draw(m: nn.Module) -> bool:
        m.eval()
        torch.rand(3)
        torch.manual_seed(0)
        return torch.is_grad_enabled()

    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    assert call(draw, whole) is False
    assert torch.equal(torch.rand(2), expected)
    assert [module.training for module in whole.modules()] == modes
    assert torch.is_grad_enabled()


def test_they_are_so_after_an_error() -> None:
    whole = model()

    def fail(m: nn.Module) -> None:
        m.eval()
        torch.rand(3)
        raise KeyError("a")

    random = torch.get_rng_state()
    with pytest.raises(KeyError):
        call(fail, whole)
    assert torch.equal(torch.get_rng_state(), random)
    assert whole.training


def test_looking_changes_nothing() -> None:
    whole = model()
    inputs = torch.randn(3, 4)
    call(lambda m: m.eval()(inputs), whole)
    call(lambda m: {name: value.clone() for name, value in m.state_dict().items()}, whole)
    call(lambda m: [float(p.norm()) for p in m.parameters()], whole)


def add_to(parameter: nn.Parameter) -> None:
    parameter += 1


def set_data(m: nn.Module) -> None:
    m[0].bias.data = torch.zeros(4)  # type: ignore[union-attr,operator,index]


def replace(m: nn.Module) -> None:
    m[3] = nn.Linear(4, 2)  # type: ignore[operator]


def remove(m: nn.Module) -> None:
    del m[3]  # type: ignore[operator]


def freeze_then_fail(m: nn.Module) -> None:
    m[0].requires_grad_(False)  # type: ignore[operator,index]
    raise KeyError("a")


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda m: add_to(m[0].weight), "the parameter 0.weight"),
        (lambda m: m.load_state_dict(m.state_dict()), "the parameter 0.weight"),
        (set_data, "the parameter 0.bias"),
        (replace, "the parameter 3.weight"),
        (remove, "the set of parameters and buffers"),
        (freeze_then_fail, "the parameter 0.weight"),
        (lambda m: m.train()(torch.randn(3, 4)), "the buffer 1.num_batches_tracked"),
        (lambda m: m.register_buffer("extra", torch.ones(1)), "the buffer extra"),
        (lambda m: m.append(nn.Linear(2, 2)), "the parameter 4.weight"),
    ],
)
def test_a_change_of_the_model_is_named(change: Callable[[nn.Module], object], what: str) -> None:
    with pytest.raises(ModelChangedError) as refused:
        call(change, model())
    assert str(refused.value).startswith(
        f"job.on_step_end changed {what}; it runs on one rank only, so the ranks would train different models. "
        "Change the model in Job.training_step, or"
    )
    assert ("call model.eval()" in str(refused.value)) == ("the buffer" in what)


def test_an_error_is_told_with_its_place_in_the_users_code() -> None:
    def look(m: nn.Module) -> None:
        m(torch.ones(3, 5))

    with pytest.raises(RuntimeError) as raised:
        call(look, model())
    message, place = str(raised.value), r" \(test_job_calls\.py, line \d+, in look\)"
    assert re.fullmatch(re.escape(f"RuntimeError: {message}") + place, error_with_place(raised.value))

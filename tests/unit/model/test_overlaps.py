"""Which tensors of a model have elements in the same memory."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm

from orchestrator.model.partial_init import build_fake
from orchestrator.model.tensor_slots import overlap_in


def model_with(**tensors: Callable[[nn.Linear], Tensor]) -> Callable[[], nn.Module]:
    """A model with a layer ``a``, and with attributes that are made from it."""

    def build() -> nn.Module:
        model = nn.Module()
        model.a = nn.Linear(4, 4)
        for name, make in tensors.items():
            value = make(model.a)
            if name == "buffer":
                model.register_buffer(name, value)
            else:
                setattr(model, name, value)
        return model

    return build


def halves() -> nn.Module:
    """Two parameters between each other in one storage, without a common element."""
    model, memory = nn.Module(), torch.zeros(4, 8)
    model.left, model.right = nn.Parameter(memory[:, :4]), nn.Parameter(memory[:, 4:])
    return model


@pytest.mark.parametrize(
    ("build", "other"),
    [
        (model_with(b=lambda a: nn.Parameter(a.weight.detach().t())), "b"),
        (model_with(b=lambda a: nn.Parameter(a.weight.detach()[3:])), "b"),
        (model_with(buffer=lambda a: a.weight.detach()), "buffer"),
        (model_with(plain=lambda a: a.weight.data), "plain"),
    ],
    ids=["transposed", "a row", "buffer", "plain attribute"],
)
def test_a_parameter_shares_its_memory(build: Callable[[], nn.Module], other: str) -> None:
    for found in (overlap_in(build()), build_fake(build, torch.device("cpu")).overlap):
        assert set(found or ()) == {"a.weight", other}


@pytest.mark.parametrize(
    "build",
    [
        model_with(b=lambda a: a.weight),
        model_with(b=lambda a: nn.Parameter(a.weight.detach().clone()), buffer=lambda a: torch.eye(3).to_sparse()),
        model_with(buffer=lambda a: a.weight.requires_grad_(False).detach()),
        halves,
        lambda: spectral_norm(nn.Linear(4, 4)),
        lambda: parametrizations.weight_norm(nn.Linear(4, 4)),
        lambda: nn.LSTM(4, 4),
    ],
    ids=["one parameter", "a copy", "frozen", "halves", "spectral norm", "weight norm", "LSTM"],
)
def test_no_parameter_shares_its_memory(build: Callable[[], nn.Module]) -> None:
    assert overlap_in(build()) is None

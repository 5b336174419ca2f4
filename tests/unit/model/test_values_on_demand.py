"""Parameters that have memory only while an operation uses them train as any others."""

import copy
import functools
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from orchestrator.model.values_on_demand import ChangedValueError, ValuesOnDemand, without_memory

CPU = torch.device("cpu")


class Plain(nn.Module):
    """Uses weights of its modules in every place: twice, as a view, from outside of their module."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.attention = nn.Embedding(7, 8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm, self.mlp = nn.LayerNorm(8), nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.table(x)
        h = h + self.attention(h, h, h)[0]
        h = h + self.mlp(self.norm(h)) * self.frozen[None]
        return F.linear(h, self.table.weight) + self.table.weight.T.sum()


class Recomputing(Plain):
    def forward(self, x: Tensor) -> Tensor:
        forward = functools.partial(super().forward)
        return checkpoint(forward, x, use_reentrant=False)


def emptied(model: nn.Module) -> nn.Module:
    model = copy.deepcopy(model)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            empty = nn.Parameter(without_memory(parameter.data, CPU), requires_grad=parameter.requires_grad)
            module.register_parameter(name, empty)
    return model


@pytest.mark.parametrize("kind", [Plain, Recomputing])
@pytest.mark.parametrize("most_bytes", [0, 1000, 10**9])
def test_gradients_are_those_of_parameters_with_memory(kind: type[nn.Module], most_bytes: int) -> None:
    torch.manual_seed(0)
    whole, x = kind(), torch.arange(6).view(2, 3)
    values, asked, peak = whole.state_dict(), list[str](), 0

    def fill(tensors: Mapping[str, Tensor]) -> None:
        nonlocal peak
        asked.extend(tensors)
        for name, tensor in tensors.items():
            tensor.copy_(values[name])
        peak = max(peak, sum(p.untyped_storage().nbytes() for p in part.parameters()))

    part = emptied(whole)
    with ValuesOnDemand(dict(part.named_parameters()), fill, most_bytes=most_bytes) as on_demand:
        found = part(x)
        found.square().sum().backward()
        on_demand.forget()
    expected = whole(x)
    expected.square().sum().backward()
    assert found.equal(expected)
    for own, wanted in zip(part.parameters(), whole.parameters(), strict=True):
        assert wanted.grad is own.grad is None or own.grad.equal(wanted.grad)
    assert not any(parameter.untyped_storage().nbytes() for parameter in part.parameters())
    at_once = values["mlp.0.weight"].nbytes + values["attention.in_proj_weight"].nbytes + 200  # with biases
    assert peak <= max(most_bytes, at_once)
    assert (len(asked) == len(values)) == (most_bytes == 10**9)


def test_a_change_of_a_parameter_is_refused() -> None:
    model = emptied(nn.Linear(2, 2))
    values = ValuesOnDemand(dict(model.named_parameters()), lambda tensors: None, most_bytes=0)
    with values, torch.no_grad(), pytest.raises(ChangedValueError, match="changes the parameter bias"):
        model.bias[:1].zero_()

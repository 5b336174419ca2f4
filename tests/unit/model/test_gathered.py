"""The dtypes in which parameters are gathered: a module computes with them as autocast computes with its own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from orchestrator.compat.torch import pytree
from orchestrator.model.precision import gathered_dtypes, gathered_share, keep_embedded_dtype

TOKENS = torch.arange(6).reshape(2, 3)
BF16 = torch.bfloat16


def rows(*shape: int) -> Tensor:
    return torch.linspace(-1, 1, int(torch.tensor(shape).prod())).reshape(shape)


class Positions(nn.Module):
    """A table that is added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table(torch.arange(3))


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...]]] = {
    "linear": (lambda: nn.Linear(8, 4), (rows(3, 8),)),
    "convolution and batch norm": (
        lambda: nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)),
        (rows(2, 3, 5, 5),),
    ),
    "embedding": (lambda: nn.Embedding(9, 8), (TOKENS,)),
    "bag": (lambda: nn.EmbeddingBag(9, 8, mode="sum"), (TOKENS, None, rows(2, 3))),
    "layer norm": (lambda: nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8)), (rows(3, 8),)),
    "layer norm of two dimensions": (lambda: nn.LayerNorm([3, 8]), (rows(2, 3, 8),)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (rows(2, 4, 3),)),
    "attention": (lambda: nn.MultiheadAttention(8, 2), (rows(3, 2, 8),) * 3),
    "transformer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0), (rows(3, 2, 8),)),
    "recurrent": (lambda: nn.LSTM(8, 6), (rows(3, 2, 8),)),
    "bilinear": (lambda: nn.Bilinear(8, 6, 4), (rows(3, 8), rows(3, 6))),
    "spectral norm": (lambda: spectral_norm(nn.Linear(8, 8)), (rows(3, 8),)),
    "positions": (Positions, (rows(2, 3, 8),)),
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("training", [True, False])
def test_a_module_computes_as_autocast_does(name: str, training: bool) -> None:
    build, inputs = MODULES[name]
    outputs = []
    for gathered in (False, True):
        torch.manual_seed(3)
        module = build().train(training)
        if gathered:
            dtypes = gathered_dtypes(module, BF16)
            keep_embedded_dtype(module)
            for parameter, dtype in dtypes.items():
                parameter.data = parameter.to(dtype)
        with torch.autocast("cpu", dtype=BF16):
            outputs.append([leaf for leaf in pytree.tree_leaves(module(*inputs)) if isinstance(leaf, Tensor)])
    for expected, found in zip(*outputs, strict=True):
        torch.testing.assert_close(found, expected, rtol=2**-8, atol=2**-8)  # dtypes too


def test_what_autocast_leaves_alone_is_gathered_as_it_is() -> None:
    model = nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 2).double(), nn.Linear(4, 2).half(), nn.LayerNorm(4)])
    model.append(nn.Linear(4, 2))
    model[4].weight = model[0].weight
    dtypes = gathered_dtypes(model, BF16)
    assert [dtypes[p] for p in model.parameters()] == [
        *(BF16, torch.float32),
        *(torch.float64,) * 2,
        *(BF16, torch.float16),
        *(torch.float32,) * 3,
    ]
    assert gathered_dtypes(model, None) == {p: p.dtype for p in model.parameters()}
    assert gathered_share(nn.Linear(4, 2), BF16) == (2 * 8 + 4 * 2) / 40
    assert gathered_share(model, None) == 1

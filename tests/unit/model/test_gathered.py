"""The dtypes in which parameters are gathered: a module computes with them as autocast computes with its own."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils._python_dispatch import TorchDispatchMode

from orchestrator.compat.torch import pytree
from orchestrator.model.precision import Casts, gathered_dtypes, gathered_share

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


class Own(nn.Module):
    """Has parameters of its own, which ``use`` computes with."""

    def __init__(self, use: Callable[[Any, Tensor], Tensor], **shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.use = use
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(shape)))

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, x)


def routed(module: Any, x: Tensor) -> Tensor:
    """A gate in float32, as in most models with experts."""
    with torch.autocast("cpu", enabled=False):
        return x * F.linear(x.float(), module.router).softmax(-1)[..., :1]


def routed_in_evaluation(module: Any, x: Tensor) -> Tensor:
    return F.linear(x, module.router) if module.training else routed(module, x)


def adapted(module: Any, x: Tensor) -> Tensor:
    return F.linear(x, module.weight) + F.linear(F.linear(x, module.a), module.b) * module.scale


def merged(module: Any, x: Tensor) -> Tensor:
    """Adds an adapter to the weight before the product."""
    return F.linear(x, module.weight + module.b @ module.a)


def packed(module: Any, x: Tensor) -> Tensor:
    q, k, v = (F.linear(x, part) for part in module.qkv.chunk(3))
    return q * k + v


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 8), nn.Linear(8, 9, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens))


OWN = {
    "router": Own(routed, router=(4, 8)),
    "router of an evaluation": Own(routed_in_evaluation, router=(8, 8)),
    "layer scale": Own(lambda m, x: m.scale * x, scale=(3, 8)),
    "position table": Own(lambda m, x: x + m.table[None], table=(3, 8)),
    "bias of two axes": Own(lambda m, x: torch.addmm(m.bias, x[0], m.weight), bias=(3, 4), weight=(8, 4)),
    "added bias of two axes": Own(lambda m, x: x @ m.weight + m.bias, bias=(3, 4), weight=(8, 4)),
    "looked up and multiplied": Own(lambda m, x: m.table[TOKENS] @ m.table.T, table=(9, 8)),
    "experts": Own(lambda m, x: torch.bmm(x, m.experts), experts=(2, 8, 4)),
    "experts by einsum": Own(lambda m, x: torch.einsum("bti,eio->ebto", x, m.experts), experts=(3, 8, 4)),
    "adapter": Own(adapted, weight=(8, 8), a=(2, 8), b=(8, 2), scale=(1,)),
    "merged adapter": Own(merged, weight=(8, 8), a=(2, 8), b=(8, 2)),
    "packed projections": Own(packed, qkv=(24, 8)),
    "cast to its input": Own(lambda m, x: F.linear(x.bfloat16(), m.weight.to(torch.bfloat16)), weight=(4, 8)),
    "cast to float32": Own(lambda m, x: (x[..., None] * m.weight.float()).sum(-2), weight=(8, 4)),
    "changed copy": Own(lambda m, x: F.linear(x, m.weight.clone().mul_(3)), weight=(4, 8)),
    "norm of a weight": Own(lambda m, x: F.linear(x, F.normalize(m.weight, dim=-1)), weight=(4, 8)),
    "penalty": Own(lambda m, x: F.linear(x, m.weight) + m.weight.square().mean(), weight=(4, 8)),
}
CAST = {"experts", "experts by einsum", "packed projections", "bias of two axes", "cast to its input"}
MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...]]] = {
    **{name: (partial(copy.deepcopy, module), (rows(2, 3, 8),)) for name, module in OWN.items()},
    "tied": (Tied, (TOKENS,)),
    "weight norm": (lambda: weight_norm(nn.Linear(8, 8)), (rows(3, 8),)),
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


class Recording(TorchDispatchMode):
    def __init__(self, casts: Casts) -> None:
        super().__init__()
        self.casts = casts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.casts.note(func, args, kwargs or {}, result)
        return result


def dtypes_of(module: nn.Module, inputs: tuple[Any, ...]) -> dict[str, torch.dtype]:
    casts = Casts(module, BF16)
    for training in (True, False):
        with torch.autocast("cpu", dtype=BF16), Recording(casts):
            module.train(training)(*inputs)
    return gathered_dtypes(module, BF16, casts.seen)


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("training", [True, False])
def test_a_module_computes_as_autocast_does(name: str, training: bool) -> None:
    build, inputs = MODULES[name]
    outputs = []
    for gathered in (False, True):
        torch.manual_seed(3)
        module = build()
        dtypes = dtypes_of(module, inputs)  # draws and counts the same in both
        module.train(training)
        for parameter_name, parameter in module.named_parameters() if gathered else ():
            parameter.data = parameter.to(dtypes[parameter_name])
        with torch.autocast("cpu", dtype=BF16):
            outputs.append([leaf for leaf in pytree.tree_leaves(module(*inputs)) if isinstance(leaf, Tensor)])
    for expected, found in zip(*outputs, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)  # dtypes too
    if name in OWN:
        assert ({*dtypes.values()} == {BF16}) == (name in CAST)


def test_what_autocast_leaves_alone_is_gathered_as_it_is() -> None:
    """Without a look at a pass, what modules of torch do is known, and nothing else."""
    model = nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 2).double(), nn.Linear(4, 2).half(), nn.LayerNorm(4)])
    model += [nn.Linear(4, 2), nn.Embedding(3, 4), Own(routed, router=(4, 8))]
    model[4].weight = model[0].weight
    dtypes = gathered_dtypes(model, BF16)
    assert [dtypes[name] for name, _ in model.named_parameters()] == [
        *(BF16, torch.float32),
        *(torch.float64,) * 2,
        *(BF16, torch.float16),
        *(torch.float32,) * 5,
    ]
    assert gathered_dtypes(model, None) == {n: p.dtype for n, p in model.named_parameters(remove_duplicate=False)}
    assert gathered_share(nn.Linear(4, 2), BF16) == (2 * 8 + 4 * 2) / 40
    assert gathered_share(nn.Linear(4, 2), BF16, {"weight": True, "bias": True}) == 1 / 2
    assert gathered_share(model, None) == 1


def test_what_a_pass_has_not_come_to_is_as_in_blocks_that_are_alike() -> None:
    blocks = nn.ModuleList(nn.ModuleList([Own(routed, router=(4, 8)), nn.Linear(4, 4)]) for _ in range(3))
    seen = {"0.0.router": True, "0.1.weight": True, "0.1.bias": True, "1.1.weight": False}
    dtypes = gathered_dtypes(blocks, BF16, seen)
    assert [name for name, dtype in dtypes.items() if dtype == torch.float32] == ["1.1.weight", "2.1.weight"]

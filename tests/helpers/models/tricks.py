"""Small language models with one trick each, at one place each, as one finds them in models that are written by hand.

A trick is an entry of :data:`TRICKS`, a module in place of an identity at one of :data:`PLACES`, or of :data:`CHANGES`,
which changes a whole model. :func:`jobs` has every trick at every place, by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from helpers.jobs.toys import Rows
from helpers.models.tasks import Reversible

WORDS, TOKENS, WIDTH, HEADS, HIDDEN = 26, 16, 32, 4, 64


class Attention(nn.Module):
    def __init__(self, number: int):
        super().__init__()
        self.number = number
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.at_queries, self.at_heads = nn.Identity(), nn.Identity()

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(self.at_queries(self.q(x))), self.split(self.k(x)), self.split(self.v(x))
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        scores = (q @ k.transpose(-1, -2)).masked_fill(later, float("-inf"))  # which can be differentiated twice
        return self.o(self.at_heads((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)))


class Mlp(nn.Module):
    def __init__(self, number: int):
        super().__init__()
        self.number = number
        self.up, self.act, self.down = nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH)
        self.at_hidden = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.at_hidden(self.act(self.up(x))))


class Block(nn.Module):
    def __init__(self, number: int):
        super().__init__()
        self.number = number
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.mlp = Attention(number), Mlp(number)
        self.at_input, self.at_output = nn.Identity(), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.at_input(x)
        x = x + self.attention(self.norm1(x))
        return self.at_output(x + self.mlp(self.norm2(x)))


class Language(nn.Module):
    """A language model. ``terms`` are added to its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(WORDS, WIDTH), nn.Parameter(0.1 * torch.randn(TOKENS, WIDTH))
        self.blocks = nn.ModuleList(Block(number) for number in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.at_embedded, self.at_final, self.at_logits = nn.Identity(), nn.Identity(), nn.Identity()
        self.terms: list[Callable[[], Tensor]] = []
        self.begins: list[Callable[[], None]] = []

    def hidden(self, words: Tensor) -> Tensor:
        x = self.at_embedded(self.embed(words) + self.place[: words.shape[1]])
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, words: Tensor) -> Any:
        for begin in self.begins:
            begin()
        logits = self.at_logits(self.head(self.at_final(self.norm(self.hidden(words)))))
        return (logits, torch.stack([term() for term in self.terms]).sum()) if self.terms else logits


@dataclass(frozen=True, kw_only=True)
class Tricky(Reversible):
    """Trains a :class:`Language` with ``trick``, the name of one of :func:`tricks`."""

    trick: str = "plain"
    lr: float = 0.1
    labels: ClassVar[int] = WORDS

    def model(self) -> nn.Module:
        model = Language()
        tricks()[self.trick](model)
        return model

    def dataset(self, split: str) -> Any:
        samples = 8 if split == "train" else 11
        x = torch.randint(0, WORDS, (samples, TOKENS), generator=torch.Generator().manual_seed(len(split)))
        return Rows(list(zip(x, x.roll(-1, 1), strict=True)))

    def loss(self, output: Any, target: Tensor) -> Tensor:
        logits, term = output if isinstance(output, tuple) else (output, 0)
        return F.cross_entropy(logits.flatten(0, 1), target.flatten()) + term

    def weight(self, target: Tensor) -> Tensor:
        return torch.tensor(target.numel())

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=self.lr)


# A trick at a place: made for the number of features there, and the number of the block.


class Trick(nn.Module):
    """Computes ``run(self, x)`` with the tensors ``parameters`` and ``buffers``; ``number`` is that of its block."""

    def __init__(
        self,
        run: Callable[[Any, Tensor], Tensor],
        number: int,
        parameters: dict[str, Tensor],
        buffers: dict[str, Tensor],
    ):
        super().__init__()
        self.run = run
        self.number = number
        for name, value in parameters.items():
            self.register_parameter(name, nn.Parameter(value))
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A trick that can be at any place.

    Attributes:
        run: what it computes.
        parameters, buffers: its tensors, given the number of features.
    """

    run: Callable[[Any, Tensor], Tensor]
    parameters: Callable[[int], dict[str, Tensor]] = lambda size: {}
    buffers: Callable[[int], dict[str, Tensor]] = lambda size: {}


def _counting(self: Any, x: Tensor) -> Tensor:
    if self.training:
        with torch.no_grad():
            self.seen += (x > 0).flatten(0, -2).sum(0).to(self.seen.dtype)
    return x


def _running(self: Any, x: Tensor) -> Tensor:
    if self.training:
        with torch.no_grad():
            self.mean.lerp_(x.flatten(0, -2).mean(0), 0.5)
    return x - 0.5 * self.mean


def _limited_by_norm(self: Any, x: Tensor) -> Tensor:
    return x * (6 / x.norm(dim=-1, keepdim=True)).clamp(max=1)


def _quantized(self: Any, x: Tensor) -> Tensor:
    step = x.detach().abs().amax(-1, keepdim=True) / 4 + 1e-6
    return x + ((x / step).round() * step - x).detach()


def _largest(self: Any, x: Tensor) -> Tensor:
    return x * (x >= x.topk(max(1, x.shape[-1] // 4), dim=-1).values[..., -1:])


TRICKS: dict[str, Kind] = {
    "scalar": Kind(run=lambda self, x: x * self.p, parameters=lambda size: {"p": torch.tensor(1.5)}),
    "temperature": Kind(run=lambda self, x: x / F.softplus(self.p), parameters=lambda size: {"p": torch.ones(1)}),
    "cap": Kind(run=lambda self, x: self.p * torch.tanh(x / self.p), parameters=lambda size: {"p": torch.tensor(2.0)}),
    "vector": Kind(
        run=lambda self, x: x * self.p + self.b,
        parameters=lambda size: {"p": torch.linspace(0.5, 1.5, size), "b": torch.linspace(-0.1, 0.1, size)},
    ),
    "mask": Kind(run=lambda self, x: x * self.m, buffers=lambda size: {"m": torch.arange(size) % 3 + 0.5}),
    "softmax": Kind(run=lambda self, x: 8 * x.softmax(-1)),
    "centred": Kind(run=lambda self, x: x - x.mean(-1, keepdim=True)),
    "limited norm": Kind(run=_limited_by_norm),
    "threshold": Kind(run=lambda self, x: torch.where(x.abs() > 3, x - x.mean(-1, keepdim=True), x)),
    "in evaluation": Kind(run=lambda self, x: x if self.training else x - x.mean(-1, keepdim=True)),
    "in one block": Kind(run=lambda self, x: x - x.mean(-1, keepdim=True) if self.number == 1 else x),
    "token before": Kind(run=lambda self, x: 0.7 * x + 0.3 * F.pad(x, (0, 0, 1, -1))),
    "mean of tokens": Kind(run=lambda self, x: x + x.mean(1, keepdim=True)),
    "quantized": Kind(run=_quantized),
    "largest": Kind(run=_largest),
    "detached scale": Kind(run=lambda self, x: x / x.detach().abs().amax((-2, -1), keepdim=True)),
    "counting": Kind(run=_counting, buffers=lambda size: {"seen": torch.zeros(size)}),
    "counting exactly": Kind(run=_counting, buffers=lambda size: {"seen": torch.zeros(size, dtype=torch.long)}),
    "running mean": Kind(run=_running, buffers=lambda size: {"mean": torch.zeros(size)}),
    "reversed": Kind(run=lambda self, x: x + 0.5 * x.flip(-1)),
    "complex": Kind(
        run=lambda self, x: torch.view_as_real(
            torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * 1j
        ).flatten(-2)
    ),
}
PLACES: dict[str, int] = {
    "embedded": WIDTH,
    "input": WIDTH,
    "queries": WIDTH,
    "heads": WIDTH,
    "hidden": HIDDEN,
    "output": WIDTH,
    "final": WIDTH,
    "logits": WORDS,
}
"""Where a trick may be, and the number of features there."""


def _put(model: Language, trick: str, place: str) -> None:
    kind, size = TRICKS[trick], PLACES[place]
    for module in list(model.modules()):
        if hasattr(module, f"at_{place}"):
            number = getattr(module, "number", 0)
            setattr(module, f"at_{place}", Trick(kind.run, number, kind.parameters(size), kind.buffers(size)))


# Tricks with a place of their own.


def _penalty(model: Language) -> None:
    model.terms.append(lambda: 0.01 * torch.stack([p.norm() for p in model.blocks.parameters() if p.ndim > 1]).sum())


def _orthogonality(model: Language) -> None:
    def term() -> Tensor:
        weights = [block.mlp.up.weight for block in model.blocks]  # type: ignore[union-attr]
        return 0.01 * torch.stack([(w.T @ w - torch.eye(WIDTH)).square().mean() for w in weights]).sum()  # type: ignore[operator]

    model.terms.append(term)


def _table_penalty(model: Language) -> None:
    model.terms.append(lambda: 0.01 * model.embed.weight.norm() + 0.01 * model.head.weight.norm(dim=1).amax())


def _max_norm(model: Language) -> None:
    def begin() -> None:
        with torch.no_grad():
            for block in model.blocks:
                for p in block.parameters():
                    if p.ndim > 1:
                        p.mul_((3 / p.norm()).clamp(max=1))

    model.begins.append(begin)


def _weights_drift(model: Language) -> None:
    def begin() -> None:
        if model.training:
            with torch.no_grad():
                first, last = model.blocks[0].mlp.up.weight, model.blocks[2].mlp.up.weight
                last.lerp_(first, 0.1)  # a moving average inside of a forward pass

    model.begins.append(begin)


def _hook(model: Language, layer: Callable[[Block], nn.Module]) -> None:
    seen: list[Tensor] = []
    model.begins.append(seen.clear)
    for block in model.blocks:
        layer(block).register_forward_hook(lambda module, args, out: seen.append(out.abs().mean()))  # type: ignore[arg-type]
    model.terms.append(lambda: 0.5 * torch.stack(seen).square().sum())


def _attribute(model: Language) -> None:
    for block in model.blocks:
        block.mlp.at_hidden = Trick(_kept, 0, {}, {})
    model.terms.append(lambda: sum((b.mlp.at_hidden.kept for b in model.blocks), torch.zeros(())))


def _kept(self: Any, x: Tensor) -> Tensor:
    self.kept = 0.1 * x.square().mean()
    return x


def _kept_outside(model: Language) -> None:
    """An auxiliary loss that is kept in an attribute, of what is whole."""
    for block in model.blocks:
        block.at_output = Trick(_kept, 0, {}, {})
    model.terms.append(lambda: sum((b.at_output.kept for b in model.blocks), torch.zeros(())))


def _second_derivative(model: Language) -> None:
    def run(self: Any, x: Tensor) -> Tensor:
        self.x = x if x.requires_grad else x.requires_grad_()
        return self.x

    model.at_embedded = Trick(run, 0, {}, {})
    state: list[Tensor] = []
    model.at_final.register_forward_hook(lambda module, args, out: state.append(out))
    model.begins.append(state.clear)

    def term() -> Tensor:
        if not torch.is_grad_enabled():
            return torch.zeros(())
        (slope,) = torch.autograd.grad(state[-1].square().sum(), model.at_embedded.x, create_graph=True)  # type: ignore[arg-type]
        return 1e-4 * slope.square().sum()

    model.terms.append(term)


class Fused(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return super().forward(x)
        return F.linear(F.gelu(F.linear(x, self.up.weight, self.up.bias)), self.down.weight, self.down.bias)


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + 0.1 * input.mean(-1, keepdim=True)


class Centred(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight - self.weight.mean(0, keepdim=True), self.bias)


class WithBias(nn.Linear):
    """Returns its bias beside its product, as layers of Megatron do."""

    def forward(self, input: Tensor) -> Any:
        return F.linear(input, self.weight), self.bias


class TwoTables(nn.Embedding):
    def __init__(self) -> None:
        super().__init__(WORDS, WIDTH)
        self.second = nn.Embedding(TOKENS, WIDTH)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + self.second(torch.arange(input.shape[1]))


class ScaledTable(nn.Embedding):
    def __init__(self) -> None:
        super().__init__(WORDS, WIDTH)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.scale


class OneHotTable(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return F.one_hot(input, WORDS).to(self.weight.dtype) @ self.weight


def _layers(model: Language, name: str, kind: Callable[..., nn.Module]) -> None:
    for block in model.blocks:
        home, _, attribute = name.rpartition(".")
        module = block.get_submodule(home)
        layer = getattr(module, attribute)
        setattr(module, attribute, kind(layer.in_features, layer.out_features))


def _classes(model: Language, kind: type[nn.Module]) -> None:
    for block in model.blocks:
        block.mlp.__class__ = kind


class TupleMlp(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        hidden, bias = self.up(x)
        return self.down(self.act(hidden + bias))


def _tuples(model: Language) -> None:
    _layers(model, "mlp.up", WithBias)
    _classes(model, TupleMlp)


class RowTupleMlp(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        out, bias = self.down(self.act(self.up(x)))
        return out + bias


def _row_tuples(model: Language) -> None:
    _layers(model, "mlp.down", WithBias)
    _classes(model, RowTupleMlp)


class Attending(nn.Module):
    def __init__(self, number: int):
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return self.inner(x, x, x, attn_mask=mask, need_weights=False)[0]


class PerHead(Attention):
    """One number for each head: a bias of distances, a temperature and a sink."""

    def __init__(self, number: int):
        super().__init__(number)
        self.slopes = nn.Parameter(torch.linspace(0.1, 1.0, HEADS))
        self.warmth = nn.Parameter(torch.linspace(0.5, 1.5, HEADS))
        self.sinks = nn.Parameter(torch.linspace(-1.0, 1.0, HEADS))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        tokens = torch.arange(x.shape[1])
        apart = (tokens[:, None] - tokens).to(x.dtype)
        scores = q @ k.transpose(-1, -2) * self.warmth[:, None, None] - apart * self.slopes[:, None, None]
        scores = scores.masked_fill(apart < 0, float("-inf"))
        sinks = self.sinks[:, None, None].expand(len(x), -1, x.shape[1], 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        return self.o((weights @ v).transpose(1, 2).flatten(2))


def _attention(model: Language, kind: Callable[[int], nn.Module]) -> None:
    for number, block in enumerate(model.blocks):
        block.attention = kind(number)


def _outside(model: Language, layer: Callable[[], nn.Module]) -> None:
    def run(self: Any, x: Tensor) -> Tensor:
        return x + 3 * torch.tanh(layer()(x)).mean(-1, keepdim=True)

    model.at_final = Trick(run, 0, {}, {})


def _with_weight_of(model: Language) -> None:
    def run(self: Any, x: Tensor) -> Tensor:
        return x + F.linear(x, model.blocks[1].mlp.up.weight).tanh().mean(-1, keepdim=True)  # type: ignore[union-attr]

    model.at_final = Trick(run, 0, {}, {})


def _states(model: Language) -> None:
    """The mean of the outputs of all blocks, in evaluations."""
    seen: list[Tensor] = []
    model.begins.append(seen.clear)
    for block in model.blocks:
        block.register_forward_hook(lambda module, args, out: seen.append(out))  # type: ignore[arg-type]
    model.at_final = Trick(lambda self, x: x if self.training else x + torch.stack(seen).mean(0), 0, {}, {})


class TupleBlock(Block):
    def forward(self, x: Tensor) -> Any:
        x = x[0] if isinstance(x, tuple) else x
        return super().forward(x), {"number": self.number}


def _tuple_blocks(model: Language) -> None:
    for block in model.blocks:
        block.__class__ = TupleBlock
    model.norm = nn.Sequential(Trick(lambda self, x: x[0], 0, {}, {}), nn.LayerNorm(WIDTH))  # type: ignore[assignment]


def _normed(
    model: Language, norm: Callable[[nn.Module], nn.Module], layer: Callable[[Language], list[nn.Module]]
) -> None:
    for module in layer(model):
        norm(module)


def _ups(model: Language) -> list[nn.Module]:
    return [block.mlp.up for block in model.blocks]  # type: ignore[union-attr, misc]


def _wide(model: Language) -> None:
    for block in model.blocks:
        nn.init.normal_(block.mlp.up.weight, std=1.0)  # type: ignore[union-attr, arg-type]
    _put(model, "limited norm", "hidden")


def _tied(model: Language) -> None:
    model.head.weight = model.embed.weight


def _attribute_kind(model: Language) -> None:
    for block in model.blocks:
        block.kind = "pre-norm"  # type: ignore[assignment]


def _logits_twice(model: Language) -> None:
    p = nn.Parameter(torch.tensor(0.5))
    model.at_logits = Trick(lambda self, x: (x + x.detach() * self.p) * self.p.exp(), 0, {"p": p}, {})


CHANGES: dict[str, Callable[[Language], None]] = {
    "plain": lambda model: None,
    "penalty": _penalty,
    "orthogonality": _orthogonality,
    "penalty of tables": _table_penalty,
    "max norm": _max_norm,
    "drifting weights": _weights_drift,
    "hook of activation": lambda model: _hook(model, lambda block: block.mlp.act),
    "hook of column": lambda model: _hook(model, lambda block: block.attention.q),
    "hook of row": lambda model: _hook(model, lambda block: block.mlp.down),
    "hook of norm": lambda model: _hook(model, lambda block: block.norm2),
    "hook of part": lambda model: _hook(model, lambda block: block.mlp),
    "auxiliary loss inside": _attribute,
    "auxiliary loss outside": _kept_outside,
    "second derivative": _second_derivative,
    "fused evaluation": lambda model: _classes(model, Fused),
    "column with a mean": lambda model: _layers(model, "mlp.up", Doubled),
    "row with a mean": lambda model: _layers(model, "mlp.down", Doubled),
    "centred column": lambda model: _layers(model, "mlp.up", Centred),
    "centred row": lambda model: _layers(model, "attention.o", Centred),
    "column of tuples": _tuples,
    "row of tuples": _row_tuples,
    "multi-head attention": lambda model: _attention(model, Attending),
    "numbers per head": lambda model: _attention(model, PerHead),
    "table with another": lambda model: setattr(model, "embed", TwoTables()),
    "table with a scale": lambda model: setattr(model, "embed", ScaledTable()),
    "one-hot table": lambda model: setattr(model, "embed", OneHotTable(WORDS, WIDTH)),
    "layer called outside": lambda model: _outside(model, lambda: model.blocks[0].mlp.up),  # type: ignore[union-attr]
    "part called outside": lambda model: _outside(model, lambda: model.blocks[0].mlp),  # type: ignore[union-attr]
    "block called outside": lambda model: _outside(model, lambda: model.blocks[1]),
    "weight used outside": _with_weight_of,
    "states in evaluation": _states,
    "blocks of tuples": _tuple_blocks,
    "weight norm": lambda model: _normed(model, nn.utils.parametrizations.weight_norm, _ups),
    "old weight norm": lambda model: _normed(model, nn.utils.weight_norm, _ups),
    "old weight norm of the head": lambda model: _normed(model, nn.utils.weight_norm, lambda m: [m.head]),
    "spectral norm": lambda model: _normed(model, nn.utils.parametrizations.spectral_norm, _ups),
    "limit of wide weights": _wide,
    "tied": _tied,
    "attribute named kind": _attribute_kind,
    "logits twice": _logits_twice,
}


def tricks() -> dict[str, Callable[[Language], None]]:
    """Return what each trick changes in a model, by name; those at places are named ``TRICK at PLACE``."""
    places = list(PLACES)
    placed: Iterator[tuple[str, str]] = (  # so that a part of them has every trick and every place
        (trick, places[(turn + number) % len(places)])
        for turn in range(len(places))
        for number, trick in enumerate(TRICKS)
    )
    return CHANGES | {
        f"{trick} at {place}": lambda model, trick=trick, place=place: _put(model, trick, place)  # type: ignore[misc]
        for trick, place in placed
    }

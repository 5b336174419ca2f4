"""Rarer tricks of features: other attention and MLPs, layers by hand, changed gradients, and shared weights."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from helpers.models.tricks import (
    CHANGES,
    HEADS,
    HIDDEN,
    WIDTH,
    WORDS,
    Attention,
    Block,
    Language,
    Mlp,
    Trick,
    tricks,
)

__all__ = ["tricks"]


def change(function: Callable[[Language], None]) -> Callable[[Language], None]:
    """Register what changes a model under the name of the function."""
    CHANGES[function.__name__.strip("_").replace("_", " ")] = function
    return function


def part(of: str) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Register a class that takes the place of the attention or of the MLP of all blocks."""

    def register(kind: type[nn.Module]) -> type[nn.Module]:
        def put(model: Language) -> None:
            for number, block in enumerate(model.blocks):
                setattr(block, of, kind(number))

        CHANGES[kind.__name__.replace("_", " ")] = put
        return kind

    return register


def parts(of: str, base: type[nn.Module], method: str, **functions: Callable[..., Tensor]) -> None:
    """Register parts that have another ``method`` than the base, by name."""
    for name, function in functions.items():
        part(of)(type(name, (base,), {method: function}))


def causal(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, **options)


# Attention.


class Mixing(Attention):
    """``mix`` mixes the values of each head."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        return causal(q, k, v, enable_gqa=True)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(layer(x)) for layer in (self.q, self.k, self.v))
        return self.o(self.mix(q, k, v, x).transpose(1, 2).flatten(2))


@part("attention")
class shared_keys(Mixing):
    kv_heads = 1

    def __init__(self, number: int):
        super().__init__(number)
        self.k, self.v = (nn.Linear(WIDTH, self.kv_heads * WIDTH // HEADS) for _ in range(2))


class Grouped(shared_keys):
    kv_heads = HEADS // 2


parts(
    "attention",
    Grouped,
    "mix",
    grouped_keys=lambda self, q, k, v, x: causal(q, *(t.repeat_interleave(2, 1) for t in (k, v))),
    tiled_keys=lambda self, q, k, v, x: causal(q, *(t.repeat(1, 2, 1, 1) for t in (k, v))),
)


@part("attention")
class heads_that_talk(Mixing):
    def __init__(self, number: int):
        super().__init__(number)
        self.talk = nn.Linear(HEADS, HEADS, bias=False)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        scores = self.talk((q @ k.mT).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return scores.masked_fill(later, -torch.inf).softmax(-1) @ v


@part("attention")
class gated_heads(Mixing):
    def __init__(self, number: int):
        super().__init__(number)
        self.gate = nn.Linear(WIDTH, HEADS)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        return causal(q, k, v) * self.gate(x).sigmoid().transpose(1, 2)[..., None]


@part("attention")
class norm_of_all_queries(Attention):
    def __init__(self, number: int):
        super().__init__(number)
        self.at_queries = nn.LayerNorm(WIDTH)


@part("attention")
class one_projection_by_heads(nn.Module):
    def __init__(self, number: int):
        super().__init__()
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (-1, 3, WIDTH // HEADS)).permute(3, 0, 2, 1, 4)
        return self.o(causal(q, k, v).transpose(1, 2).flatten(2))


class TwoHeads(nn.Module):
    """Gets the biases of its heads when it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 2
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, biases: Tensor) -> Tensor:
        size = WIDTH // 2
        q, k, v = (layer(x).unflatten(-1, (self.heads, size)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=biases)
        return self.o(mixed.transpose(1, 2).flatten(2))


class AddsToResidual(Mlp):
    def forward(self, x: Tensor, residual: Tensor) -> Tensor:  # type: ignore[override]
        return residual + super().forward(x)


class GivenBiases(Block):
    def __init__(self, number: int):
        super().__init__(number)
        self.attention, self.mlp = TwoHeads(), AddsToResidual(number)

    def forward(self, x: Tensor, biases: Tensor) -> Tensor:  # type: ignore[override]
        x = x + self.attention(self.norm1(x), biases)
        return self.mlp(self.norm2(x), x)


@change
def two_heads_and_a_residual_that_is_given(model: Language) -> None:
    """As many heads as samples, whose biases are an argument, as a hidden state is one elsewhere."""
    model.blocks = nn.ModuleList(GivenBiases(number) for number in range(3))
    first = torch.arange(WORDS)
    later = (first[:, None] < first).float() * -1e9
    model.register_buffer("biases", later - torch.tensor([0.1, 0.5])[:, None, None] * (first[:, None] - first).abs())

    def hidden(words: Tensor) -> Tensor:
        x, tokens = model.at_embedded(model.embed(words) + model.place[: words.shape[1]]), words.shape[1]
        for block in model.blocks:
            x = block(x, model.biases[:, :tokens, :tokens])
        return x

    model.hidden = hidden  # type: ignore[method-assign]


# MLPs.


@part("mlp")
class gate_beside_each_feature(Mlp):
    def __init__(self, number: int):
        super().__init__(number)
        self.up = nn.Linear(WIDTH, 2 * HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(h[..., ::2] * h[..., 1::2].sigmoid())


@part("mlp")
class gate_in_reverse(gate_beside_each_feature):
    def forward(self, x: Tensor) -> Tensor:
        first, second = self.up(x).chunk(2, -1)
        return self.down(first * second.flip(-1).sigmoid())


parts(
    "mlp",
    Mlp,
    "forward",
    weight_used_twice=lambda self, x: F.linear(F.gelu(self.up(x)), self.up.weight.T),
    layers_called_twice=lambda self, x: Mlp.forward(self, x) + Mlp.forward(self, x.flip(-1)),
    sorted_features=lambda self, x: self.down(F.gelu(self.up(x)).sort(-1).values),
)


@part("mlp")
class largest_of_two_halves(Mlp):
    def __init__(self, number: int):
        super().__init__(number)
        self.down = nn.Linear(HIDDEN // 2, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).unflatten(-1, (2, -1)).amax(-2))


@part("mlp")
class batch_norm_of_features(Mlp):
    def __init__(self, number: int):
        super().__init__(number)
        self.norm = nn.BatchNorm1d(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(self.norm(h.flatten(0, 1)).view_as(h).relu())


@part("mlp")
class experts(nn.Module):
    def __init__(self, number: int):
        super().__init__()
        self.router, self.of = nn.Linear(WIDTH, 4), nn.ModuleList(Mlp(i) for i in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        return torch.stack([weights[..., i, None] * expert(x) for i, expert in enumerate(self.of)]).sum(0)


@part("mlp")
class pruned(Mlp):
    def __init__(self, number: int):
        super().__init__(number)
        prune.random_unstructured(self.up, "weight", 0.5)


class Ternary(nn.Linear):
    """Computes with weights of three values, and rounds its input by its largest number."""

    def forward(self, input: Tensor) -> Tensor:
        scale, step = self.weight.detach().abs().mean(), input.detach().abs().amax(-1, keepdim=True) / 7
        weight = self.weight + ((self.weight / scale).round().clamp(-1, 1) * scale - self.weight).detach()
        return F.linear(input + ((input / step).round() * step - input).detach(), weight, self.bias)


class Adapted(nn.Linear):
    def __init__(self, size: int, outputs: int):
        super().__init__(size, outputs)
        self.a, self.b = nn.Parameter(0.1 * torch.randn(4, size)), nn.Parameter(0.1 * torch.randn(outputs, 4))

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + F.linear(F.linear(input, self.a), self.b)


class Directed(nn.Linear):
    """Has a length of its own for each row, as DoRA."""

    def __init__(self, size: int, outputs: int):
        super().__init__(size, outputs)
        self.lengths = nn.Parameter(torch.linspace(0.5, 1.5, outputs))

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.lengths[:, None] * F.normalize(self.weight, dim=1), self.bias)


for layer in ("mlp.up", "mlp.down", "attention.o"):
    for kind in (Ternary, Adapted, Directed):

        def put(model: Language, layer: str = layer, kind: type[nn.Linear] = kind) -> None:
            for block in model.blocks:
                home, _, name = layer.partition(".")
                of = getattr(block, home)
                setattr(of, name, kind(getattr(of, name).in_features, getattr(of, name).out_features))

        CHANGES[f"{kind.__name__.lower()} {layer}"] = put

# Gradients.


class _Changed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, how: str) -> Tensor:
        ctx.how = how
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.how == "halved":
            return gradient / 2, None
        return gradient / (100 * gradient.norm(dim=-1, keepdim=ctx.how == "normed") + 1e-9), None


def _hooked(self: Any, x: Tensor) -> Tensor:
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient / (1000 * gradient.abs().amax() + 1e-9))
    return x * 1


def _trick(at: str, run: Callable[[Any, Tensor], Tensor]) -> Callable[[Language], None]:
    def put(model: Language) -> None:
        for module in [*model.modules()]:
            if hasattr(module, f"at_{at}"):
                setattr(module, f"at_{at}", Trick(run, 0, {}, {}))

    return put


for at in ("hidden", "output", "logits"):
    CHANGES[f"gradient halved, {at}"] = _trick(at, lambda self, x: _Changed.apply(x, "halved"))
    CHANGES[f"gradient normed, {at}"] = _trick(at, lambda self, x: _Changed.apply(x, "normed"))
    CHANGES[f"tensor hook, {at}"] = _trick(at, _hooked)


def each(**changes: Callable[[Any], Any]) -> None:
    """Register what changes each block, by name."""
    for name, run in changes.items():
        CHANGES[name.replace("_", " ")] = lambda model, run=run: [run(block) for block in model.blocks]  # type: ignore[misc]


def centre(module: Any, args: Any) -> None:
    with torch.no_grad():
        module.weight.sub_(module.weight.mean(1, keepdim=True))


def recomputed_mlp(block: Any) -> None:
    forward = block.mlp.forward
    block.mlp.forward = lambda x: checkpoint(forward, x, use_reentrant=False)


def frozen_queries_and_rows(block: Any) -> None:
    block.attention.q.requires_grad_(False)
    block.mlp.down.weight.requires_grad_(False)


each(
    backward_hook_that_norms=lambda block: block.mlp.act.register_full_backward_hook(
        lambda module, given, of: (given[0] / (given[0].norm() + 1e-9),)
    ),
    hook_of_a_weight_that_centres=lambda block: block.mlp.up.weight.register_hook(lambda g: g - g.mean()),
    weights_centred_before_calls=lambda block: block.mlp.down.register_forward_pre_hook(centre),
    recomputed_mlp=recomputed_mlp,
    frozen_queries_and_rows=frozen_queries_and_rows,
)

# Layers that are shared or read.


@change
def one_mlp_for_all_blocks(model: Language) -> None:
    for block in model.blocks:
        block.mlp = model.blocks[0].mlp


@change
def one_norm_for_all_blocks(model: Language) -> None:
    for block in model.blocks:
        block.norm1 = model.blocks[0].norm1


@change
def number_of_parameters(model: Language) -> None:
    count = lambda: sum(p.numel() for p in model.parameters())  # noqa: E731
    model.at_final = Trick(lambda self, x: x * math.log(count()) / 8, 0, {}, {})


@change
def distance_of_blocks(model: Language) -> None:
    model.terms.append(lambda: (model.blocks[0].mlp.up.weight - model.blocks[1].mlp.up.weight).square().mean())


@change
def teacher_that_follows(model: Language) -> None:
    """A frozen copy of the blocks whose weights move to those of the blocks in forward()."""
    model.teacher = copy.deepcopy(model.blocks).requires_grad_(False)
    seen: list[Tensor] = []
    model.begins.append(seen.clear)
    model.at_embedded.register_forward_hook(lambda module, args, out: seen.append(out))
    model.at_final.register_forward_hook(lambda module, args, out: seen.append(out))

    def term() -> Tensor:
        with torch.no_grad():
            y = seen[0]
            for block in model.teacher:
                y = block(y)
            if model.training:
                for own, followed in zip(model.teacher.parameters(), model.blocks.parameters(), strict=True):
                    own.lerp_(followed, 0.3)
        return 0.1 * (seen[1] - F.layer_norm(y, (WIDTH,))).square().mean()

    model.terms.append(term)


# Logits.


@change
def gate_of_each_token(model: Language) -> None:
    model.gate = nn.Linear(WIDTH, 1)
    seen: list[Tensor] = []
    model.begins.append(seen.clear)
    model.at_final.register_forward_hook(lambda module, args, out: seen.append(out))
    model.at_logits = Trick(lambda self, x: x * model.gate(seen[0]).sigmoid(), 0, {}, {})


@change
def mixture_of_softmaxes(model: Language) -> None:
    model.second, model.mixing = nn.Linear(WIDTH, WORDS), nn.Linear(WIDTH, 2)
    seen: list[Tensor] = []
    model.begins.append(seen.clear)
    model.at_final.register_forward_hook(lambda module, args, out: seen.append(out))

    def run(self: Any, x: Tensor) -> Tensor:
        weights = model.mixing(seen[0]).log_softmax(-1)
        return torch.logaddexp(
            x.log_softmax(-1) + weights[..., :1], model.second(seen[0]).log_softmax(-1) + weights[..., 1:]
        )

    model.at_logits = Trick(run, 0, {}, {})


@change
def words_read_back(model: Language) -> None:
    model.at_final = Trick(lambda self, x: x + model.head(x).softmax(-1) @ model.embed.weight, 0, {}, {})


@change
def logits_of_an_early_block_too(model: Language) -> None:
    model.early = nn.Linear(WIDTH, WORDS)

    def forward(words: Tensor) -> Tensor:
        x = model.blocks[0](model.embed(words) + model.place[: words.shape[1]])
        early = model.early(x)
        for block in model.blocks[1:]:
            x = block(x)
        return model.head(model.norm(x)) + early

    model.forward = forward  # type: ignore[method-assign]


@change
def logits_in_16_bits(model: Language) -> None:
    model.at_logits = Trick(lambda self, x: x.bfloat16().to(x.dtype), 0, {}, {})


@change
def number_of_rows(model: Language) -> None:
    model.at_logits = Trick(lambda self, x: x / math.log(model.head.weight.shape[0]), 0, {}, {})

"""Decoder-only transformers as sequences of blocks, in the architectures of GPT-2 and of Llama.

The model is an ``nn.Sequential`` of ``embed``, ``block0`` and so on, ``norm`` and ``head``, so a pipeline can be cut
between any two. Every module maps (batch, time, width) to the same shape, except for the ends: ``embed`` takes tokens
of shape (batch, time), and ``head`` returns logits of shape (batch, time, vocabulary). If documents are kept apart, the
number of each token's document, of shape (batch, time), goes along, in a pair, up to the last block. ``embed`` also
takes pairs of tokens and their positions, which then go along, too, so that the blocks can have some of the tokens.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Variant = Literal["gpt2", "llama"]
Stream = Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor | None, Tensor | None, Tensor]
"""What goes from block to block: vectors, of shape (batch, time, width), or these and the numbers of the documents; or
vectors, these numbers, those of all keys, of shape (batch, 1, time), and positions; no numbers without documents."""

STD = 0.02
"""The standard deviation of initial weights in GPT-2 and Llama."""


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary positions are stretched to contexts that are ``factor`` times as long as in pretraining.

    With ``original_context``, as in Llama 3.1: frequencies with fewer than ``low`` turns in that many tokens are
    divided by ``factor``, those with more than ``high`` turns are kept, and those between are interpolated. Without,
    all frequencies are divided: linear scaling (Chen et al., 2023, https://arxiv.org/abs/2306.15595).
    """

    factor: float
    original_context: int | None = None
    low: float = 1.0
    high: float = 4.0


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The sizes of a transformer.

    Attributes:
        variant: ``gpt2``: layer norms, learned positions, an MLP with GELU (Radford et al., 2019). ``llama``: root mean
            square norms, rotary positions, an MLP with SwiGLU, no biases (Touvron et al., 2023,
            https://arxiv.org/abs/2302.13971).
        vocabulary: the number of different tokens.
        context: the most tokens that ``gpt2`` can see at once; ``llama`` has no such limit.
        layers: the number of blocks.
        width: the size of a token's vector; a multiple of ``heads``.
        heads: the number of heads of the queries; a multiple of ``kv_heads``.
        kv_heads: the number of heads of keys and values (grouped-query attention: Ainslie et al., 2023,
            https://arxiv.org/abs/2305.13245).
        hidden: the width inside of the MLP.
        tied: whether the head uses the weights of the embedding.
        bias: whether linear layers have biases.
        dropout: the probability in the residual branches.
        norm_eps: what norms add to the variance.
        rope_base: the base of the rotary frequencies.
        rope_scaling: how rotary frequencies are stretched; None for not at all.
        end_token: the token between documents, which opens the next one: a token then sees its own document only, and
            positions begin at 0 in each. None if a token sees all before it.
    """

    variant: Variant
    vocabulary: int
    context: int
    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    tied: bool
    bias: bool
    dropout: float = 0.0
    norm_eps: float = 1e-5
    rope_base: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    end_token: int | None = None


_GPT2 = Architecture(
    variant="gpt2", vocabulary=50_257, context=1024, layers=12, width=768, heads=12, kv_heads=12, hidden=3072,
    tied=True, bias=True,
)  # fmt: skip
_LLAMA = Architecture(
    variant="llama", vocabulary=128_256, context=2048, layers=16, width=2048, heads=32, kv_heads=8, hidden=8192,
    tied=True, bias=False, rope_base=500_000.0,
)  # fmt: skip
Size = Literal["tiny", "124m", "350m", "1b", "3b", "8b", "70b", "405b"]
SIZES: Mapping[Size, Architecture] = {
    "tiny": replace(
        _GPT2, vocabulary=256, context=64, layers=4, width=64, heads=4, kv_heads=4, hidden=256, tied=False, bias=False
    ),
    "124m": _GPT2,
    "350m": replace(_GPT2, layers=24, width=1024, heads=16, kv_heads=16, hidden=4096),
    "1b": _LLAMA,
    "3b": replace(_LLAMA, layers=28, width=3072, heads=24),
    "8b": replace(_LLAMA, layers=32, width=4096, hidden=14_336, tied=False),
    "70b": replace(_LLAMA, layers=80, width=8192, heads=64, hidden=28_672, tied=False),
    "405b": replace(_LLAMA, layers=126, width=16_384, heads=128, hidden=53_248, tied=False),
}
"""GPT-2 small and medium, Llama 3 in its sizes but with a shorter context, and one that learns in minutes on a CPU."""


def transformer(a: Architecture) -> nn.Sequential:
    """Build the model, with initial weights as GPT-2 has them."""
    stack: OrderedDict[str, nn.Module] = OrderedDict(embed=Embed(a))
    for i in range(a.layers):
        stack[f"block{i}"] = Block(a, is_last=i == a.layers - 1)
    stack["norm"] = norm(a)
    stack["head"] = linear(a.width, a.vocabulary, bias=False)
    model = nn.Sequential(stack)
    if a.tied:
        model.get_submodule("head").weight = model.get_parameter("embed.token.weight")
    return model


class Embed(nn.Module):
    """Embeds tokens and, in ``gpt2``, their positions: (batch, time) -> (batch, time, width)."""

    def __init__(self, a: Architecture):
        super().__init__()
        self.dropout = a.dropout if a.variant == "gpt2" else 0.0
        self.token = embedding(a.vocabulary, a.width)
        self.position = embedding(a.context, a.width) if a.variant == "gpt2" else None
        self.end_token = a.end_token

    def forward(self, inputs: Tensor | tuple[Tensor, Tensor]) -> Stream:
        tokens, given = inputs if isinstance(inputs, (tuple, list)) else (inputs, None)
        out: Tensor = self.token(tokens)
        positions = torch.arange(tokens.shape[1], device=tokens.device) if given is None else given
        ends = None if self.end_token is None else tokens == self.end_token
        if self.position is not None:
            if ends is not None:
                positions = positions - torch.where(ends, positions, 0).cummax(dim=1).values
            out = out + self.position(positions)
        out = F.dropout(out, self.dropout, self.training)
        documents = None if ends is None else ends.cumsum(dim=1)
        if given is not None:
            return out, documents, None if documents is None else documents[:, None], given
        return out if documents is None else (out, documents)


class Block(nn.Module):
    """Causal self-attention and an MLP, each after a norm and added to its input."""

    def __init__(self, a: Architecture, *, is_last: bool):
        super().__init__()
        self.is_last = is_last
        self.dropout = a.dropout
        self.norm1 = norm(a)
        self.attention = Attention(a)
        self.norm2 = norm(a)
        self.mlp = MLP(a)

    def forward(self, stream: Stream) -> Stream:
        x, *along = stream if isinstance(stream, tuple) else (stream,)
        x = x + F.dropout(self.attention(self.norm1(x), *along), self.dropout, self.training)
        x = x + F.dropout(self.mlp(self.norm2(x)), self.dropout, self.training)
        return (x, *along) if along and not self.is_last else x


class Attention(nn.Module):
    """Causal self-attention, whose keys and values may be shared by groups of heads."""

    def __init__(self, a: Architecture):
        super().__init__()
        self.size = a.width // a.heads
        self.grouped = a.kv_heads < a.heads
        self.q = linear(a.width, a.heads * self.size, bias=a.bias)
        self.k = linear(a.width, a.kv_heads * self.size, bias=a.bias)
        self.v = linear(a.width, a.kv_heads * self.size, bias=a.bias)
        self.mix = linear(a.heads * self.size, a.width, bias=a.bias, std=residual_std(a))
        self.rotary = Rotary(self.size, a.rope_base, a.rope_scaling) if a.variant == "llama" else None

    def forward(
        self,
        x: Tensor,
        documents: Tensor | None = None,
        of_keys: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        # (batch, time, heads * size) -> (batch, heads, time, size)
        q, k, v = (f(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for f in (self.q, self.k, self.v))
        if self.rotary is not None:
            q, k = self.rotary(q, k, positions)
        mask = None
        if documents is not None:
            of_keys = documents[:, None] if of_keys is None else of_keys
            keys = torch.arange(of_keys.shape[-1], device=x.device)
            places = keys if positions is None else positions[:, None]
            mask = (documents[:, None, :, None] == of_keys[:, None]) & (places[..., None] >= keys)
        mixed = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=self.grouped)
        out: Tensor = self.mix(mixed.transpose(1, 2).flatten(2))
        return out


class Rotary(nn.Module):
    """Turns queries and keys by angles in proportion to their positions (Su et al., 2021,
    https://arxiv.org/abs/2104.09864), with the two halves of a head as the coordinates, as in Hugging Face."""

    frequencies: Tensor

    def __init__(self, size: int, base: float, scaling: RopeScaling | None):
        super().__init__()
        frequencies = 1 / base ** (torch.arange(0, size, 2) / size)
        if scaling is not None:
            turns = (scaling.original_context or 0) * frequencies / (2 * math.pi)
            kept = ((turns - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1)
            frequencies = frequencies * (kept + (1 - kept) / scaling.factor)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, q: Tensor, k: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
        positions = torch.arange(q.shape[2], device=q.device) if positions is None else positions[:, None]
        angles = positions[..., None] * self.frequencies.float()
        cos, sin = (torch.cat([part, part], dim=-1).to(q.dtype) for part in (angles.cos(), angles.sin()))
        return q * cos + quarter_turn(q) * sin, k * cos + quarter_turn(k) * sin


class MLP(nn.Module):
    """GELU between two linear layers, or SwiGLU (Shazeer, 2020, https://arxiv.org/abs/2002.05202)."""

    def __init__(self, a: Architecture):
        super().__init__()
        self.gate = linear(a.width, a.hidden, bias=a.bias) if a.variant == "llama" else None
        self.up = linear(a.width, a.hidden, bias=a.bias)
        self.down = linear(a.hidden, a.width, bias=a.bias, std=residual_std(a))

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.up(x), approximate="tanh") if self.gate is None else F.silu(self.gate(x)) * self.up(x)
        out: Tensor = self.down(hidden)
        return out


def norm(a: Architecture) -> nn.Module:
    if a.variant == "llama":
        return nn.RMSNorm(a.width, eps=a.norm_eps)
    return nn.LayerNorm(a.width, eps=a.norm_eps)


def linear(inputs: int, outputs: int, *, bias: bool, std: float = STD) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=bias)
    nn.init.normal_(layer.weight, std=std)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


def embedding(rows: int, width: int) -> nn.Embedding:
    table = nn.Embedding(rows, width)
    nn.init.normal_(table.weight, std=STD)
    return table


def residual_std(a: Architecture) -> float:
    """The deviation for what is added to the residual stream; it keeps the stream's variance independent of depth."""
    return STD / math.sqrt(2 * a.layers)


def quarter_turn(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)

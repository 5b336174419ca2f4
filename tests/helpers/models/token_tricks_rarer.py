"""Rarer tricks of tokens: keys without tokens, pooling, sorting and experts, changed gradients, limits of losses."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from helpers.models.token_language import (
    HEADS,
    TOKENS,
    WIDTH,
    Attention,
    Block,
    Language,
    Mlp,
    heads,
    merged,
    of_tokens,
    trick,
)

# In attention.


@trick("attention", "right")
class prefix_of_keys(Attention):
    def __init__(self, number: int):
        super().__init__(number)
        self.prefix = nn.Parameter(torch.randn(2, HEADS, 4, WIDTH // HEADS))

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        k, v = (torch.cat([p.expand(len(q), -1, -1, -1), t], 2) for p, t in zip(self.prefix, (k, v), strict=True))
        return F.scaled_dot_product_attention(q, k, v, F.pad(mask, (4, 0), value=True))


@trick("attention", "right")
class over_channels(Attention):
    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q.mT, k.mT, v.mT).mT


@trick("attention", "right")
class rotary_by_length(Attention):
    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        angles = torch.arange(q.shape[-2], dtype=q.dtype)[:, None] / q.shape[-2]

        def turned(x: Tensor) -> Tensor:
            first, second = x.chunk(2, -1)
            return x * angles.cos() + torch.cat([-second, first], -1) * angles.sin()

        return F.scaled_dot_product_attention(turned(q), turned(k), v, mask)


@trick("attention", "right")
class slopes_of_distances(Attention):
    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        places = torch.arange(q.shape[-2])
        biases = -(places[:, None] - places).abs().to(q.dtype) * torch.tensor([0.5, 0.1])[:, None, None]
        return F.scaled_dot_product_attention(q, k, v, biases.masked_fill(~mask, -torch.inf))


@trick("attention", "right")
class near_tokens_if_long(Attention):
    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask & mask.triu(-6) if q.shape[-2] > 30 else mask)


@trick("attention", "right")
class shared_keys(Attention):
    def __init__(self, number: int):
        super().__init__(number)
        self.k, self.v = (nn.Linear(WIDTH, WIDTH // HEADS) for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        k, v = (layer(x)[:, None] for layer in (self.k, self.v))
        out: Tensor = self.out(merged(F.scaled_dot_product_attention(heads(self.q(x)), k, v, mask, enable_gqa=True)))
        return out


@trick("attention", "right")
class queries_of_every_fourth(Attention):
    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q[..., ::4, :], k, v, mask[::4]).repeat_interleave(4, -2)


@trick("attention", "right")
class pooled_keys(Attention):
    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, *(t.unflatten(-2, (-1, 4)).mean(-2) for t in (k, v)))


@trick("attention", "right")
class tokens_first(nn.Module):
    def __init__(self, number: int):
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, HEADS)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        out: Tensor = self.inner(x, x, x, attn_mask=~mask, need_weights=False)[0].transpose(0, 1)
        return out


@trick("attention", "right")
class recurrence(nn.Module):
    def __init__(self, number: int):
        super().__init__()
        self.inner = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        out: Tensor = self.inner(x)[0]
        return out


@trick("attention", "right")
class weights_for_places(nn.Module):
    def __init__(self, number: int):
        super().__init__()
        self.mixing, self.out = nn.Parameter(0.1 * torch.randn(TOKENS, TOKENS)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        out: Tensor = self.out((self.mixing[: x.shape[1], : x.shape[1]] * mask) @ x)
        return out


@trick("attention", "refused")
class recomputed_attention(Attention):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return checkpoint(super().forward, x, mask, use_reentrant=False)


# In the rest of blocks.


@trick("mlp", "right")
class first_token_alone(Mlp):
    def hidden(self, x: Tensor) -> Tensor:
        h = super().hidden(x)
        return torch.cat([2 * h[:, :1], h[:, 1:]], 1)


@trick("mlp", "right")
class by_number_of_tokens(Mlp):
    def hidden(self, x: Tensor) -> Tensor:
        return super().hidden(x) * 10 / x.shape[1]


@trick("mlp", "right")
class sorted_tokens(Mlp):
    def hidden(self, x: Tensor) -> Tensor:
        h = super().hidden(x)
        order = h.norm(dim=-1).argsort(1)[..., None].expand_as(h)
        return h.gather(1, order).cumsum(1).gather(1, order.argsort(1)) / 9


@trick("mlp", "right")
class pooled_tokens(Mlp):
    def hidden(self, x: Tensor) -> Tensor:
        return F.avg_pool1d(super().hidden(x).mT, 3, 1, 1).mT


@trick("mlp", "right")
class computed_in_chunks(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([Mlp.forward(self, part) for part in x.split(5, 1)], 1)


@trick("mlp", "right")
class recomputed(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


@trick("mlp", "right")
class one_expert_for_each_token(nn.Module):
    def __init__(self, number: int):
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 3), nn.ModuleList(Mlp(i) for i in range(3))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights = self.router(flat).softmax(-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            chosen = weights.argmax(-1) == number
            out[chosen] = expert(flat[chosen]) * weights[chosen][:, number, None]
        return out.view_as(x)


@trick("mlp", "right")
class rounded_by_the_largest(Mlp):
    def hidden(self, x: Tensor) -> Tensor:
        h = super().hidden(x)
        step = h.detach().abs().amax() / 7
        return h + ((h / step).round() * step - h).detach()


class _Changed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, normed: bool) -> Tensor:
        ctx.normed = normed
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return (gradient / (100 * gradient.norm() + 1e-9) if ctx.normed else gradient / 2), None


@trick("mlp", "right")
class gradient_halved(Mlp):
    def hidden(self, x: Tensor) -> Tensor:
        out: Tensor = _Changed.apply(super().hidden(x), False)
        return out


@trick("mlp", "refused")
class gradient_normed(Mlp):
    def hidden(self, x: Tensor) -> Tensor:
        out: Tensor = _Changed.apply(super().hidden(x), True)
        return out


@trick("mlp", "right")
class moving_mean_that_is_not_saved(Mlp):
    def __init__(self, number: int):
        super().__init__(number)
        self.register_buffer("mean", torch.zeros(2 * WIDTH), persistent=False)

    def hidden(self, x: Tensor) -> Tensor:
        h = super().hidden(x)
        if self.training:
            self.mean = self.mean.lerp(h.detach().mean((0, 1)), 0.5)
        return h - self.mean


@trick("block", "refused", only=[1, 2])
class memory_tokens(Block):
    def __init__(self, number: int):
        super().__init__(number)
        self.memory = nn.Parameter(torch.randn(4, WIDTH))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = torch.cat([self.memory.expand(len(x), -1, -1), x], 1)
        return super().forward(x, F.pad(mask, (4, 0, 4, 0), value=True))[:, 4:]


@trick("block", "refused")
class skipped_by_value(Block):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return super().forward(x, mask) if bool(x.mean() > 0) else 1.1 * x


# Between blocks, outside of them, and in the loss.


@trick("between", "right")
class fewer_tokens_in_the_middle(Language):
    def through(self, x: Tensor, mask: Tensor) -> Tensor:
        first = self.blocks[0](x, mask)
        x = first.unflatten(1, (-1, 2)).mean(2)
        for block in self.blocks[1:3]:
            x = block(x, mask[::2, ::2])
        out: Tensor = self.blocks[3](first + x.repeat_interleave(2, 1), mask)
        return out


@trick("between", "right")
class reversed_in_evaluations(Language):
    def through(self, x: Tensor, mask: Tensor) -> Tensor:
        for block in self.blocks if self.training else reversed(self.blocks):
            x = block(x, mask)
        return x


@trick("outside", "right")
class logits_by_length(Language):
    def forward(self, words: Tensor) -> Any:
        out = super().forward(words)
        return out / math.log(out.shape[1])


@trick("outside", "right")
class one_layer_of_keys(Language):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.mixer.k = self.blocks[0].mixer.k


@trick("outside", "refused")
class second_derivative(Language):
    def forward(self, words: Tensor) -> Any:
        x = self.embedded(words)
        x = x if x.requires_grad else x.requires_grad_()
        with sdpa_kernel(SDPBackend.MATH):  # which can be differentiated twice
            h = self.norm(self.through(x, self.mask(words)))
        if not torch.is_grad_enabled():
            return self.head(h), h.new_zeros(())
        (slope,) = torch.autograd.grad(h.square().sum(), x, create_graph=True)
        return self.head(h), 1e-3 * slope.square().mean()


@trick("loss", "right")
def small_labels_are_left_out(output: Tensor, target: Tensor) -> Tensor:
    return of_tokens(output, torch.where(target < 4, -100, target))


@trick("loss", "right")
def limited_mean(output: Tensor, target: Tensor) -> Tensor:
    return of_tokens(output, target).clamp(max=3.4)


@trick("loss", "right")
def flooded(output: Tensor, target: Tensor) -> Tensor:
    return (of_tokens(output, target) - 0.2).abs() + 0.2


@trick("loss", "right")
def squared_mean(output: Tensor, target: Tensor) -> Tensor:
    return of_tokens(output, target).square()

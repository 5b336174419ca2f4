"""Tricks of tokens with layers, parameters or buffers of their own."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from helpers.models.token_language import (
    HEADS,
    TOKENS,
    WIDTH,
    Attention,
    Block,
    Mlp,
    heads,
    merged,
    trick,
)


@trick("attention", "right")
class torchs_own(nn.Module):
    def __init__(self, number: int):
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.inner(x, x, x, attn_mask=~mask, need_weights=False)[0]


@trick("attention", "right")
class torchs_own_with_weights(torchs_own):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        out, weights = self.inner(x, x, x, attn_mask=~mask)
        return out * weights.amax(-1, keepdim=True)


@trick("mlp", "right", only=[2])
class depthwise_convolution(Mlp):
    def __init__(self, number: int):
        super().__init__(number)
        self.inner = nn.Conv1d(2 * WIDTH, 2 * WIDTH, 3, padding=2, groups=2 * WIDTH)

    def hidden(self, x: Tensor) -> Tensor:
        h = super().hidden(x)
        return self.inner(h.mT)[..., : x.shape[1]].mT


@trick("mlp", "right")
class batch_norm(Mlp):
    def __init__(self, number: int):
        super().__init__(number)
        self.inner = nn.BatchNorm1d(2 * WIDTH)

    def hidden(self, x: Tensor) -> Tensor:
        return self.inner(super().hidden(x).mT).mT


@trick("mlp", "right")
class counts_in_a_buffer(Mlp):
    load: Tensor

    def __init__(self, number: int):
        super().__init__(number)
        self.register_buffer("load", torch.zeros(()))

    def hidden(self, x: Tensor) -> Tensor:
        h = super().hidden(x)
        if self.training:
            self.load += (h.detach() > 0).sum()
        return h * (1 + torch.tanh(self.load / 1e4))


@trick("attention", "right")
class prefix_of_keys(Attention):
    def __init__(self, number: int):
        super().__init__(number)
        self.prefix = nn.Parameter(torch.randn(2, HEADS, 4, WIDTH // HEADS))

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        k, v = (torch.cat([p.expand(len(q), -1, -1, -1), t], 2) for p, t in zip(self.prefix, (k, v), strict=True))
        return F.scaled_dot_product_attention(q, k, v, F.pad(mask, (4, 0), value=True))


@trick("attention", "right")
class shared_keys(Attention):
    def __init__(self, number: int):
        super().__init__(number)
        self.k, self.v = (nn.Linear(WIDTH, WIDTH // HEADS) for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        k, v = (layer(x)[:, None] for layer in (self.k, self.v))
        return self.out(merged(F.scaled_dot_product_attention(heads(self.q(x)), k, v, mask, enable_gqa=True)))


@trick("attention", "right")
class tokens_first(nn.Module):
    def __init__(self, number: int):
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, HEADS)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        return self.inner(x, x, x, attn_mask=~mask, need_weights=False)[0].transpose(0, 1)


@trick("attention", "right")
class recurrence(nn.Module):
    def __init__(self, number: int):
        super().__init__()
        self.inner = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.inner(x)[0]


@trick("attention", "right")
class weights_for_places(nn.Module):
    def __init__(self, number: int):
        super().__init__()
        self.mixing, self.out = nn.Parameter(0.1 * torch.randn(TOKENS, TOKENS)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.out((self.mixing[: x.shape[1], : x.shape[1]] * mask) @ x)


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

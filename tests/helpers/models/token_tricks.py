"""Small language models with one trick each, by which tokens of a sample depend on each other or on their number.

:data:`TRICKS` has for each what it changes in the base model, where, and whether a division of samples by tokens trains
the same model or is refused. Those inside of blocks are here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from helpers.jobs.toys import Rows
from helpers.models import token_tricks_outside, token_tricks_rarer
from helpers.models.tasks import Reversible
from helpers.models.token_language import (
    HEADS,
    TOKENS,
    TRICKS,
    WIDTH,
    WORDS,
    Attention,
    Block,
    Language,
    Mlp,
    Trick,
    trick,
)
from orchestrator.job import Split

__all__ = ["TRICKS", "Tricky", "token_tricks_outside", "token_tricks_rarer"]


@dataclass(frozen=True, kw_only=True)
class Tricky(Reversible):
    """The base model with a trick."""

    trick: str = "none"
    length: int = TOKENS
    adam: bool = False

    def model(self) -> nn.Module:
        model = TRICKS[self.trick].model()
        assert isinstance(model, nn.Module)
        return model

    def dataset(self, split: Split) -> Rows:
        generator = torch.Generator().manual_seed(len(split))
        samples = 8 if split == "train" else 11
        words = torch.randint(0, WORDS, (samples, self.length + 1), generator=generator)
        targets = words[:, 1:].clone()
        for row, target in enumerate(targets):
            target[: row * 11 % self.length] = -100
        inputs = TRICKS[self.trick].inputs
        return Rows([(inputs(row[:-1]), target) for row, target in zip(words, targets, strict=True)])

    def loss(self, output: Any, target: Tensor) -> Tensor:
        return TRICKS[self.trick].loss(output, target)

    def weight(self, target: Tensor) -> Tensor:
        return (target >= 0).sum()

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-2) if self.adam else torch.optim.SGD(parameters, lr=0.3)


# In attention.


@trick("attention", "right")
class written_out(Attention):
    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v


@trick("attention", "right")
class windows(Attention):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        parts = x.unflatten(1, (-1, 16)).flatten(0, 1)
        return super().forward(parts, mask[:16, :16]).unflatten(0, (len(x), -1)).flatten(1, 2)


@trick("attention", "right", only=[2])
class windows_of_one_block(windows):
    pass


@trick("attention", "right")
class chunked_keys(Attention):
    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return torch.cat(
            [F.scaled_dot_product_attention(p, k, v, m) for p, m in zip(q.split(12, -2), mask.split(12), strict=True)],
            -2,
        )


@trick("attention", "right")
class counted_positions(Attention):
    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        turned = torch.arange(q.shape[-2])[:, None] / 10
        return F.scaled_dot_product_attention(q * turned.cos(), k * turned.cos(), v, mask)


@trick("attention", "right")
class linear_attention(Attention):
    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        sums = (F.elu(k)[..., None] * v[..., None, :]).cumsum(2)
        return torch.einsum("bhtd,bhtde->bhte", F.elu(q), sums) / 10


@trick("attention", "right")
class shifted_keys(Attention):
    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, F.pad(k, (0, 0, 1, -1)), v, mask)


@trick("attention", "right")
class logarithm_of_length(Attention):
    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q * math.log(q.shape[-2]), k, v, mask)


@trick("attention", "right")
class causal_by_flag(Attention):
    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@trick("attention", "right")
class first_token_is_a_sink(Attention):
    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask) + v[:, :, :1]


@trick("attention", "right")
class normed_over_tokens(Attention):
    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, F.normalize(k, dim=-2) * 4, v, mask)


@trick("attention", "right")
class threshold_of_all_tokens(Attention):
    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        out = F.scaled_dot_product_attention(q, k, v, mask)
        return out / out.abs().amax((-1, -2), keepdim=True).clamp(min=2)


@trick("attention", "right")
class torchs_own(nn.Module):
    def __init__(self, number: int):
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        out: Tensor = self.inner(x, x, x, attn_mask=~mask, need_weights=False)[0]
        return out


@trick("attention", "right")
class torchs_own_with_weights(torchs_own):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        out, weights = self.inner(x, x, x, attn_mask=~mask)
        result: Tensor = out * weights.amax(-1, keepdim=True)
        return result


@trick("attention", "right")
class other_in_evaluations(Attention):
    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        out = super().mix(q, k, v, mask)
        return out if self.training else out - out.mean(-2, keepdim=True)


@trick("attention", "right", only=[1])
class after_its_first_call(Attention):
    calls = 0

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        self.calls += 1
        out = super().mix(q, k, v, mask)
        return out if self.calls < 2 else out - 0.5 * out.mean(-2, keepdim=True)


# In the rest of blocks.


@trick("mlp", "right", only=[1, 2])
class token_shift(Mlp):
    def hidden(self, x: Tensor) -> Tensor:
        return super().hidden(0.7 * x + 0.3 * F.pad(x, (0, 0, 1, -1)))


@trick("mlp", "right", only=[2])
class depthwise_convolution(Mlp):
    def __init__(self, number: int):
        super().__init__(number)
        self.inner = nn.Conv1d(2 * WIDTH, 2 * WIDTH, 3, padding=2, groups=2 * WIDTH)

    def hidden(self, x: Tensor) -> Tensor:
        h = super().hidden(x)
        out: Tensor = self.inner(h.mT)[..., : x.shape[1]].mT
        return out


@trick("mlp", "right")
class sums_of_tokens(Mlp):
    def hidden(self, x: Tensor) -> Tensor:
        return super().hidden(x.cumsum(1) / 8)


@trick("mlp", "right", only=[3])
class squeeze_and_excite(Mlp):
    def hidden(self, x: Tensor) -> Tensor:
        h = super().hidden(x)
        return h * h.mean(1, keepdim=True).sigmoid()


@trick("mlp", "right")
class odd_blocks_are_normed_over_tokens(Mlp):
    def hidden(self, x: Tensor) -> Tensor:
        h = super().hidden(x)
        return 8 * h.softmax(1) if self.number % 2 else h


@trick("mlp", "right")
class experts_of_limited_capacity(Mlp):
    def hidden(self, x: Tensor) -> Tensor:
        h = super().hidden(x)
        chosen = h[..., 0].topk(x.shape[1] // 3, dim=1).indices
        return h * torch.zeros(h.shape[:2], dtype=h.dtype).scatter(1, chosen, 1.0)[..., None]


@trick("mlp", "right")
class batch_norm(Mlp):
    def __init__(self, number: int):
        super().__init__(number)
        self.inner = nn.BatchNorm1d(2 * WIDTH)

    def hidden(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(super().hidden(x).mT).mT
        return out


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


@trick("mlp", "right", only=[1])
class mean_kept_as_a_number(Mlp):
    seen = 0.0

    def hidden(self, x: Tensor) -> Tensor:
        h = super().hidden(x) * (1 + self.seen)
        if self.training:
            self.seen = float(h.detach().abs().mean())
        return h


@trick("mlp", "right")
class dropout_of_nothing(Mlp):
    def hidden(self, x: Tensor) -> Tensor:
        return F.dropout(super().hidden(x), 0.0, self.training)


class _Balance(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, torch.ones((), dtype=gradient.dtype)


@trick("mlp", "refused")
class loss_in_the_backward_pass(Mlp):
    def hidden(self, x: Tensor) -> Tensor:
        h = super().hidden(x)
        out: Tensor = _Balance.apply(h, 0.1 * h.softmax(-1).mean((0, 1)).square().sum())
        return out


@trick("block", "right", only=[1])
class shifted_in_the_block(Block):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return super().forward(0.7 * x + 0.3 * F.pad(x, (0, 0, 1, -1)), mask)


@trick("block", "refused", only=[1, 2])
class mean_added_in_the_block(Block):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return super().forward(x + x.mean(1, keepdim=True), mask)


@trick("block", "right", only=[1, 2])
class every_second_token(Block):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        odd = torch.arange(x.shape[1])[:, None] % 2
        return super().forward(x * (1 + odd), mask)


@trick("block", "right", only=[1])
class reversed_tokens(Block):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return super().forward(x.flip(1), mask.flip(1)).flip(1)


@trick("block", "refused", only=[1, 2])
class shifted_in_two_blocks(shifted_in_the_block):
    pass


@trick("block", "right", only=[1, 2])
class only_the_last_half(Block):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        out = super().forward(x, mask)
        half = x.shape[1] // 2
        return torch.cat([x[:, :half], out[:, half:]], 1)


@trick("block", "right")
class blocks_that_return_dicts(Block):
    def forward(self, x: Any, mask: Tensor) -> Any:
        return {"hidden": super().forward(x["hidden"] if isinstance(x, dict) else x, mask)}


TRICKS["blocks that return dicts"] = Trick(
    where="block",
    expected="right",
    model=type(
        "Language",
        (Language,),
        {
            "block": blocks_that_return_dicts,
            "forward": lambda self, words: self.head(
                self.norm(self.through(self.embedded(words), self.mask(words))["hidden"])
            ),
        },
    ),
)


@trick("block", "refused")
class large_values_see_each_other(Block):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        out = super().forward(x, mask)
        return out - out.mean(1, keepdim=True) if out.abs().amax() > 40 else out

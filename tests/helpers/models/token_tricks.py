"""Small language models with one trick each, by which tokens of a sample depend on each other or on their number.

:data:`TRICKS` has for each what it changes in the base model, where, and whether a division of samples by tokens trains
the same model or is refused. Those that need no more than a function in a block are here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from helpers.jobs.toys import Rows
from helpers.models import token_tricks_outside, token_tricks_rarer
from helpers.models.tasks import Reversible
from helpers.models.token_language import TOKENS, TRICKS, WORDS, Attention, Block, Language, Mlp, Trick, rows, trick
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

attend = F.scaled_dot_product_attention


def later(x: Tensor) -> Tensor:
    """What was one token before."""
    return F.pad(x, (0, 0, 1, -1))


def partly_later(x: Tensor) -> Tensor:
    return 0.7 * x + 0.3 * later(x)


def windows(self: Any, x: Tensor, mask: Tensor) -> Tensor:
    parts = x.unflatten(1, (-1, 16)).flatten(0, 1)
    return Attention.forward(self, parts, mask[:16, :16]).unflatten(0, (len(x), -1)).flatten(1, 2)


def after_its_first_call(self: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    self.calls = getattr(self, "calls", 0) + 1
    out = attend(q, k, v, mask)
    return out if self.calls < 2 else out - 0.5 * out.mean(-2, keepdim=True)


def with_slopes(q: Tensor, mask: Tensor) -> Tensor:
    places = torch.arange(q.shape[-2])
    biases = -(places[:, None] - places).abs().to(q.dtype) * torch.tensor([0.5, 0.1])[:, None, None]
    return biases.masked_fill(~mask, -torch.inf)


def turned(x: Tensor) -> Tensor:
    angles = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] / x.shape[-2]
    first, second = x.chunk(2, -1)
    return x * angles.cos() + torch.cat([-second, first], -1) * angles.sin()


rows("attention.forward", windows=windows)
rows("attention.forward", only=[2], windows_of_one_block=windows)
rows("attention.mix", only=[1], after_its_first_call=after_its_first_call)
rows(
    "attention.mix",
    written_out=lambda self, q, k, v, mask: (
        (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~mask, -torch.inf).softmax(-1) @ v
    ),
    chunked_keys=lambda self, q, k, v, mask: torch.cat(
        [attend(p, k, v, m) for p, m in zip(q.split(12, -2), mask.split(12), strict=True)], -2
    ),
    counted_positions=lambda self, q, k, v, mask: attend(
        *(t * (torch.arange(q.shape[-2])[:, None] / 10).cos() for t in (q, k)), v, mask
    ),
    linear_attention=lambda self, q, k, v, mask: (
        torch.einsum("bhtd,bhtde->bhte", F.elu(q), (F.elu(k)[..., None] * v[..., None, :]).cumsum(2)) / 10
    ),
    shifted_keys=lambda self, q, k, v, mask: attend(q, later(k), v, mask),
    logarithm_of_length=lambda self, q, k, v, mask: attend(q * math.log(q.shape[-2]), k, v, mask),
    causal_by_flag=lambda self, q, k, v, mask: attend(q, k, v, is_causal=True),
    first_token_is_a_sink=lambda self, q, k, v, mask: attend(q, k, v, mask) + v[:, :, :1],
    normed_over_tokens=lambda self, q, k, v, mask: attend(q, F.normalize(k, dim=-2) * 4, v, mask),
    threshold_of_all_tokens=lambda self, q, k, v, mask: (
        (out := attend(q, k, v, mask)) / out.abs().amax((-1, -2), keepdim=True).clamp(min=2)
    ),
    other_in_evaluations=lambda self, q, k, v, mask: (
        attend(q, k, v, mask) if self.training else (out := attend(q, k, v, mask)) - out.mean(-2, keepdim=True)
    ),
    over_channels=lambda self, q, k, v, mask: attend(q.mT, k.mT, v.mT).mT,
    rotary_by_length=lambda self, q, k, v, mask: attend(turned(q), turned(k), v, mask),
    slopes_of_distances=lambda self, q, k, v, mask: attend(q, k, v, with_slopes(q, mask)),
    near_tokens_if_long=lambda self, q, k, v, mask: attend(q, k, v, mask & mask.triu(-6) if q.shape[-2] > 30 else mask),
    queries_of_every_fourth=lambda self, q, k, v, mask: attend(q[..., ::4, :], k, v, mask[::4]).repeat_interleave(
        4, -2
    ),
    pooled_keys=lambda self, q, k, v, mask: attend(q, *(t.unflatten(-2, (-1, 4)).mean(-2) for t in (k, v))),
)
rows(
    "attention.forward",
    expected="refused",
    recomputed_attention=lambda self, *given: checkpoint(partial(Attention.forward, self), *given, use_reentrant=False),
)

# In the rest of blocks.


class _Balance(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, torch.ones((), dtype=gradient.dtype)


class _Changed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, normed: bool) -> Tensor:
        ctx.normed = normed
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return (gradient / (100 * gradient.norm() + 1e-9) if ctx.normed else gradient / 2), None


def mean_kept_as_a_number(self: Any, h: Tensor) -> Tensor:
    h = h * (1 + getattr(self, "seen", 0.0))
    if self.training:
        self.seen = float(h.detach().abs().mean())
    return h


def experts_of_limited_capacity(self: Any, h: Tensor) -> Tensor:
    chosen = h[..., 0].topk(h.shape[1] // 3, dim=1).indices
    return h * torch.zeros(h.shape[:2], dtype=h.dtype).scatter(1, chosen, 1.0)[..., None]


def sorted_tokens(self: Any, h: Tensor) -> Tensor:
    order = h.norm(dim=-1).argsort(1)[..., None].expand_as(h)
    return h.gather(1, order).cumsum(1).gather(1, order.argsort(1)) / 9


def rounded_by_the_largest(self: Any, h: Tensor) -> Tensor:
    step = h.detach().abs().amax() / 7
    return h + ((h / step).round() * step - h).detach()


def of_hidden(run: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    """A function of what an MLP computes inside."""
    return lambda self, x: run(self, Mlp.hidden(self, x))


rows(
    "mlp.hidden",
    odd_blocks_are_normed_over_tokens=of_hidden(lambda self, h: 8 * h.softmax(1) if self.number % 2 else h),
    experts_of_limited_capacity=of_hidden(experts_of_limited_capacity),
    dropout_of_nothing=of_hidden(lambda self, h: F.dropout(h, 0.0, self.training)),
    first_token_alone=of_hidden(lambda self, h: torch.cat([2 * h[:, :1], h[:, 1:]], 1)),
    by_number_of_tokens=of_hidden(lambda self, h: h * 10 / h.shape[1]),
    sorted_tokens=of_hidden(sorted_tokens),
    pooled_tokens=of_hidden(lambda self, h: F.avg_pool1d(h.mT, 3, 1, 1).mT),
    rounded_by_the_largest=of_hidden(rounded_by_the_largest),
    gradient_halved=of_hidden(lambda self, h: _Changed.apply(h, False)),
    sums_of_tokens=lambda self, x: Mlp.hidden(self, x.cumsum(1) / 8),
)
rows("mlp.hidden", only=[1, 2], token_shift=lambda self, x: Mlp.hidden(self, partly_later(x)))
rows("mlp.hidden", only=[3], squeeze_and_excite=of_hidden(lambda self, h: h * h.mean(1, keepdim=True).sigmoid()))
rows("mlp.hidden", only=[1], mean_kept_as_a_number=of_hidden(mean_kept_as_a_number))
rows(
    "mlp.hidden",
    expected="refused",
    loss_in_the_backward_pass=of_hidden(
        lambda self, h: _Balance.apply(h, 0.1 * h.softmax(-1).mean((0, 1)).square().sum())
    ),
    gradient_normed=of_hidden(lambda self, h: _Changed.apply(h, True)),
)
rows(
    "mlp.forward",
    computed_in_chunks=lambda self, x: torch.cat([Mlp.forward(self, part) for part in x.split(5, 1)], 1),
    recomputed=lambda self, x: checkpoint(partial(Mlp.forward, self), x, use_reentrant=False),
)


def only_the_last_half(self: Any, x: Tensor, mask: Tensor) -> Tensor:
    out, half = Block.forward(self, x, mask), x.shape[1] // 2
    return torch.cat([x[:, :half], out[:, half:]], 1)


def large_values_see_each_other(self: Any, x: Tensor, mask: Tensor) -> Tensor:
    out = Block.forward(self, x, mask)
    return out - out.mean(1, keepdim=True) if out.abs().amax() > 40 else out


shifted: Callable[..., Any] = lambda self, x, mask: Block.forward(self, partly_later(x), mask)  # noqa: E731
rows("block.forward", only=[1], shifted_in_the_block=shifted)
rows(
    "block.forward",
    only=[1],
    reversed_tokens=lambda self, x, mask: Block.forward(self, x.flip(1), mask.flip(1)).flip(1),
)
rows(
    "block.forward",
    only=[1, 2],
    every_second_token=lambda self, x, mask: Block.forward(self, x * (1 + torch.arange(x.shape[1])[:, None] % 2), mask),
    only_the_last_half=only_the_last_half,
)
rows(
    "block.forward",
    expected="refused",
    only=[1, 2],
    mean_added_in_the_block=lambda self, x, mask: Block.forward(self, x + x.mean(1, keepdim=True), mask),
    shifted_in_two_blocks=shifted,
)
rows(
    "block.forward",
    expected="refused",
    large_values_see_each_other=large_values_see_each_other,
    skipped_by_value=lambda self, x, mask: Block.forward(self, x, mask) if bool(x.mean() > 0) else 1.1 * x,
)


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

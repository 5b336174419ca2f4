"""Small language models with one trick each, by which tokens of a sample depend on each other or on their number.

:data:`TRICKS` has for each what it changes in the base model, where, and whether a division of samples by tokens trains
the same model or is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from helpers.jobs.toys import Rows
from orchestrator.job import Job, Split

WORDS, TOKENS, WIDTH, HEADS = 26, 48, 16, 2
Where = Literal["attention", "mlp", "block", "between", "outside", "loss", "output"]
Expected = Literal["right", "refused"]


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def merged(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


class Attention(nn.Module):
    def __init__(self, number: int):
        super().__init__()
        self.number = number
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (heads(layer(x)) for layer in (self.q, self.k, self.v))
        out: Tensor = self.out(merged(self.mix(q, k, v, mask)))
        return out


class Mlp(nn.Module):
    def __init__(self, number: int):
        super().__init__()
        self.number = number
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def hidden(self, x: Tensor) -> Tensor:
        return F.gelu(self.up(x))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.hidden(x))
        return out


class Block(nn.Module):
    attention: Callable[[int], nn.Module] = Attention
    mlp: Callable[[int], nn.Module] = Mlp

    def __init__(self, number: int):
        super().__init__()
        self.number = number
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mixer, self.ffn = type(self).attention(number), type(self).mlp(number)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.mixer(self.norm1(x), mask)
        out: Tensor = x + self.ffn(self.norm2(x))
        return out


class Language(nn.Module):
    block: Callable[[int], nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(WORDS, WIDTH), nn.Embedding(4 * TOKENS, WIDTH)
        self.blocks = nn.ModuleList(type(self).block(number) for number in range(4))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def mask(self, words: Tensor) -> Tensor:
        return torch.ones(words.shape[1], words.shape[1], dtype=torch.bool).tril()

    def embedded(self, words: Tensor) -> Tensor:
        out: Tensor = self.token(words) + self.place(torch.arange(words.shape[1]))
        return out

    def between(self, x: Tensor, number: int) -> Tensor:
        return x

    def through(self, x: Tensor, mask: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = block(self.between(x, number), mask)
        return x

    def forward(self, words: Tensor) -> Any:
        return self.head(self.norm(self.through(self.embedded(words), self.mask(words))))


@dataclass(frozen=True, kw_only=True)
class Tricky(Job):
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
        words = torch.randint(0, WORDS, (8, self.length + 1), generator=generator)
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


def of_tokens(output: Any, target: Tensor) -> Tensor:
    logits, *terms = output if isinstance(output, tuple) else (output,)
    loss = F.cross_entropy(logits.flatten(0, 1), target.flatten())
    return loss + sum(terms) if terms else loss


@dataclass(frozen=True, kw_only=True)
class Trick:
    """A trick.

    Attributes:
        where: what it changes.
        expected: what becomes of it.
        model: the constructor of the model.
        loss: the loss of its output.
        inputs: what the model is called with for the words of a sample.
    """

    where: Where
    expected: Expected
    model: Callable[[], nn.Module] = Language
    loss: Callable[[Any, Tensor], Tensor] = of_tokens
    inputs: Callable[[Tensor], Any] = lambda words: words


TRICKS: dict[str, Trick] = {"none": Trick(where="block", expected="right")}


def trick(where: Where, expected: Expected, only: Iterable[int] | None = None) -> Callable[[Any], Any]:
    """Register a class or a function under its name; ``only``: of these blocks."""

    def register(member: Any) -> Any:
        name = member.__name__.strip("_").replace("_", " ")
        if where in ("attention", "mlp", "block"):
            base = {"attention": Attention, "mlp": Mlp, "block": Block}[where]
            chosen = range(4) if only is None else only

            def make(number: int) -> nn.Module:
                made: nn.Module = (member if number in chosen else base)(number)
                return made

            kind = make if where == "block" else type("Block", (Block,), {where: staticmethod(make)})
            model: Any = type("Language", (Language,), {"block": staticmethod(kind)})
            TRICKS[name] = Trick(where=where, expected=expected, model=model)
        elif where == "loss":
            TRICKS[name] = Trick(where=where, expected=expected, loss=member)
        else:
            TRICKS[name] = Trick(where=where, expected=expected, model=member)
        return member

    return register


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


@trick("attention", "refused", only=[1])
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


@trick("mlp", "refused", only=[1])
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


@trick("block", "refused", only=[1, 2])
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


@trick("block", "refused", only=[1, 2])
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


# Between blocks and outside of them.


@trick("between", "right")
class shift_between_blocks(Language):
    def between(self, x: Tensor, number: int) -> Tensor:
        return 0.7 * x + 0.3 * F.pad(x, (0, 0, 1, -1)) if number == 2 else x


@trick("between", "right")
class mean_between_blocks(Language):
    def between(self, x: Tensor, number: int) -> Tensor:
        return x + x.mean(1, keepdim=True) if number == 3 else x


@trick("between", "right")
class positions_in_each_block(Language):
    def between(self, x: Tensor, number: int) -> Tensor:
        out: Tensor = x + self.place(torch.arange(x.shape[1]))
        return out


@trick("between", "right")
class noted_by_hooks(Language):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []
        for block in self.blocks:
            block.register_forward_hook(lambda module, args, out: self.seen.append(out.square().mean()))

    def forward(self, words: Tensor) -> Any:
        self.seen.clear()
        return super().forward(words), 0.1 * torch.stack(self.seen).sum()


@trick("between", "refused")
class noted_by_hooks_inside(Language):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []
        for block in self.blocks:
            block.ffn.up.register_forward_hook(lambda module, args, out: self.seen.append(out.square().mean()))

    def forward(self, words: Tensor) -> Any:
        self.seen.clear()
        return super().forward(words), 0.1 * torch.stack(self.seen).sum()


@trick("between", "right")
class hidden_states(Language):
    def through(self, x: Tensor, mask: Tensor) -> Tensor:
        states = []
        for block in self.blocks:
            x = block(x, mask)
            states.append(x)
        return torch.stack(states).mean(0) + states[1].mean(1, keepdim=True)


@trick("between", "right")
class hidden_states_in_evaluations(hidden_states):
    def through(self, x: Tensor, mask: Tensor) -> Tensor:
        return Language.through(self, x, mask) if self.training else super().through(x, mask)


@trick("between", "right")
class one_block_twice(Language):
    def through(self, x: Tensor, mask: Tensor) -> Tensor:
        x = super().through(x, mask)
        out: Tensor = self.blocks[1](x, mask)
        return out


@trick("outside", "right")
class shape_of_the_words(Language):
    def forward(self, words: Tensor) -> Any:
        x = self.norm(self.through(self.embedded(words), self.mask(words)))
        return self.head(x.view(-1, words.shape[1], WIDTH))


@trick("outside", "right")
class convolution_before_and_after(Language):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = (nn.Conv1d(WIDTH, WIDTH, 3, padding=1) for _ in range(2))

    def forward(self, words: Tensor) -> Any:
        x = self.embedded(words)
        x = self.through(x + self.before(x.mT).mT, self.mask(words))
        return self.head(self.norm(x + self.after(x.mT).mT))


@trick("outside", "right")
class embeddings_added_to_the_end(Language):
    def forward(self, words: Tensor) -> Any:
        x = self.embedded(words)
        return self.head(self.norm(x + self.through(x, self.mask(words))))


@trick("outside", "right")
class logits_normed_over_tokens(Language):
    def forward(self, words: Tensor) -> Any:
        logits = super().forward(words)
        return logits - logits.mean(1, keepdim=True)


@trick("outside", "right")
class batch_norm_at_the_end(Language):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.BatchNorm1d(WIDTH)

    def forward(self, words: Tensor) -> Any:
        x = self.through(self.embedded(words), self.mask(words))
        return self.head(self.last(x.mT).mT)


@trick("outside", "right")
class a_gru_at_the_end(Language):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, words: Tensor) -> Any:
        x = self.through(self.embedded(words), self.mask(words))
        return self.head(self.norm(self.last(x)[0]))


@trick("outside", "right")
class weights_count(Language):
    def forward(self, words: Tensor) -> Any:
        return super().forward(words), 0.01 * torch.stack([p.square().sum() for p in self.blocks.parameters()]).sum()


@trick("outside", "right")
class tokens_count(Language):
    def forward(self, words: Tensor) -> Any:
        x = self.norm(self.through(self.embedded(words), self.mask(words)))
        return self.head(x), 0.1 * x.logsumexp(1).mean()


@trick("outside", "refused")
class losses_kept_in_blocks(Language):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Kept(number) for number in range(4))

    def forward(self, words: Tensor) -> Any:
        return super().forward(words), sum(block.kept for block in self.blocks)


class _Kept(Block):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        out = super().forward(x, mask)
        self.kept = 0.1 * out.softmax(-1).mean((0, 1)).square().sum()
        return out


@trick("outside", "right")
class masks_of_documents(Language):
    def mask(self, words: Tensor) -> Tensor:
        document = (words == 0).cumsum(1)
        return super().mask(words) & (document[:, None, :, None] == document[:, None, None, :])


@trick("outside", "right")
class prefix_of_learned_tokens(Language):
    def __init__(self) -> None:
        super().__init__()
        self.prefix = nn.Parameter(torch.randn(4, WIDTH))

    def embedded(self, words: Tensor) -> Tensor:
        return torch.cat([self.prefix.expand(len(words), -1, -1), super().embedded(words)[:, 4:]], 1)


@trick("outside", "refused")
class longer_than_the_sample(prefix_of_learned_tokens):
    def embedded(self, words: Tensor) -> Tensor:
        return torch.cat([self.prefix.expand(len(words), -1, -1), Language.embedded(self, words)], 1)

    def forward(self, words: Tensor) -> Any:
        mask = torch.ones(words.shape[1] + 4, words.shape[1] + 4, dtype=torch.bool).tril()
        return self.head(self.norm(self.through(self.embedded(words), mask)[:, 4:]))


@trick("output", "right")
class one_class_for_each_sample(Language):
    def forward(self, words: Tensor) -> Any:
        x = self.norm(self.through(self.embedded(words), self.mask(words)))
        return self.head(x.mean(1, keepdim=True)).expand(-1, words.shape[1], -1)


# In the loss.


@trick("loss", "right")
def weighted_by_place(output: Tensor, target: Tensor) -> Tensor:
    losses = F.cross_entropy(output.mT, target, reduction="none")
    return (losses * torch.linspace(0, 1, target.shape[1])).sum() / (target >= 0).sum()


@trick("loss", "right")
def without_the_first_tokens(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output[:, 20:].flatten(0, 1), target[:, 20:].flatten())


@trick("loss", "right")
def shifted_labels(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output[:, :-1].flatten(0, 1), target[:, 1:].flatten())


@trick("loss", "right")
def of_the_worst_tokens(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.mT, target, reduction="none").topk(4, dim=1).values.mean()


@trick("loss", "right")
def smooth_over_tokens(output: Tensor, target: Tensor) -> Tensor:
    return of_tokens(output, target) + 0.1 * (output[:, 1:] - output[:, :-1]).square().mean()


@trick("loss", "right")
def mean_of_samples(output: Tensor, target: Tensor) -> Tensor:
    losses = F.cross_entropy(output.mT, target, reduction="none").sum(1)
    return (losses / (target >= 0).sum(1).clamp(min=1)).mean()

"""The base of models with a trick each, by which tokens of a sample depend on each other or on their number."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

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
        return self.out(merged(self.mix(q, k, v, mask)))


class Mlp(nn.Module):
    def __init__(self, number: int):
        super().__init__()
        self.number = number
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def hidden(self, x: Tensor) -> Tensor:
        return F.gelu(self.up(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.hidden(x))


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
        return x + self.ffn(self.norm2(x))


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
        return self.token(words) + self.place(torch.arange(words.shape[1]))

    def between(self, x: Tensor, number: int) -> Tensor:
        return x

    def through(self, x: Tensor, mask: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = block(self.between(x, number), mask)
        return x

    def forward(self, words: Tensor) -> Any:
        return self.head(self.norm(self.through(self.embedded(words), self.mask(words))))


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


BASES: dict[str, Any] = {"attention": Attention, "mlp": Mlp, "block": Block}


def trick(where: Where, expected: Expected, only: Iterable[int] | None = None) -> Callable[[Any], Any]:
    """Register a class under its name; ``only``: of these blocks."""

    def register(member: Any) -> Any:
        name = member.__name__.strip("_").replace("_", " ")
        if where in BASES:
            chosen = range(4) if only is None else only

            def make(number: int) -> nn.Module:
                return (member if number in chosen else BASES[where])(number)

            kind = make if where == "block" else type("Block", (Block,), {where: staticmethod(make)})
            model: Any = type("Language", (Language,), {"block": staticmethod(kind)})
            TRICKS[name] = Trick(where=where, expected=expected, model=model)
        else:
            TRICKS[name] = Trick(where=where, expected=expected, model=member)
        return member

    return register


def rows(at: str, expected: Expected = "right", only: Any = None, **functions: Callable[..., Any]) -> None:
    """Register tricks by name that have another method than the base ``at``, as in ``mlp.hidden``."""
    where, _, method = at.partition(".")
    for name, function in functions.items():
        trick(where, expected, only)(type(name, (BASES.get(where, Language),), {method: function}))  # type: ignore[arg-type]

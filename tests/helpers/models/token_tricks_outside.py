"""Tricks between blocks, outside of them, and in the loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from helpers.models.token_language import TRICKS, WIDTH, Block, Language, Trick, of_tokens, rows, trick

# Between blocks and outside of them.


def final(self: Language, words: Tensor) -> Tensor:
    """What the head gets."""
    return self.norm(self.through(self.embedded(words), self.mask(words)))


rows(
    "between.between",
    shift_between_blocks=lambda self, x, number: 0.7 * x + 0.3 * F.pad(x, (0, 0, 1, -1)) if number == 2 else x,
    mean_between_blocks=lambda self, x, number: x + x.mean(1, keepdim=True) if number == 3 else x,
    positions_in_each_block=lambda self, x, number: x + self.place(torch.arange(x.shape[1])),
)
rows("between.through", one_block_twice=lambda self, x, mask: self.blocks[1](Language.through(self, x, mask), mask))
rows(
    "outside.forward",
    shape_of_the_words=lambda self, words: self.head(final(self, words).view(-1, words.shape[1], WIDTH)),
    embeddings_added_to_the_end=lambda self, words: self.head(
        self.norm((x := self.embedded(words)) + self.through(x, self.mask(words)))
    ),
    logits_normed_over_tokens=lambda self, words: (
        (logits := Language.forward(self, words)) - logits.mean(1, keepdim=True)
    ),
    logits_by_length=lambda self, words: Language.forward(self, words) / math.log(words.shape[1]),
    weights_count=lambda self, words: (
        Language.forward(self, words),
        0.01 * torch.stack([p.square().sum() for p in self.blocks.parameters()]).sum(),
    ),
    tokens_count=lambda self, words: (self.head(x := final(self, words)), 0.1 * x.logsumexp(1).mean()),
)
rows(
    "output.forward",
    one_class_for_each_sample=lambda self, words: self.head(final(self, words).mean(1, keepdim=True)).expand(
        -1, words.shape[1], -1
    ),
)


@trick("between", "right")
class noted_by_hooks(Language):
    noted: Callable[[Any], nn.Module] = staticmethod(lambda block: block)

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []
        for block in self.blocks:
            self.noted(block).register_forward_hook(lambda module, args, out: self.seen.append(out.square().mean()))

    def forward(self, words: Tensor) -> Any:
        self.seen.clear()
        return super().forward(words), 0.1 * torch.stack(self.seen).sum()


@trick("between", "refused")
class noted_by_hooks_inside(noted_by_hooks):
    noted = staticmethod(lambda block: block.ffn.up)


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


@trick("between", "right")
class fewer_tokens_in_the_middle(Language):
    def through(self, x: Tensor, mask: Tensor) -> Tensor:
        first = self.blocks[0](x, mask)
        x = first.unflatten(1, (-1, 2)).mean(2)
        for block in self.blocks[1:3]:
            x = block(x, mask[::2, ::2])
        return self.blocks[3](first + x.repeat_interleave(2, 1), mask)


@trick("between", "right")
class reversed_in_evaluations(Language):
    def through(self, x: Tensor, mask: Tensor) -> Tensor:
        for block in self.blocks if self.training else reversed(self.blocks):
            x = block(x, mask)
        return x


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


# In the loss.


def of_each(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.mT, target, reduction="none")


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "weighted by place": lambda output, target: (
        (of_each(output, target) * torch.linspace(0, 1, target.shape[1])).sum() / (target >= 0).sum()
    ),
    "without the first tokens": lambda output, target: of_tokens(output[:, 20:], target[:, 20:]),
    "shifted labels": lambda output, target: of_tokens(output[:, :-1], target[:, 1:]),
    "of the worst tokens": lambda output, target: of_each(output, target).topk(4, dim=1).values.mean(),
    "smooth over tokens": lambda output, target: (
        of_tokens(output, target) + 0.1 * (output[:, 1:] - output[:, :-1]).square().mean()
    ),
    "mean of samples": lambda output, target: (
        of_each(output, target).sum(1) / (target >= 0).sum(1).clamp(min=1)
    ).mean(),
    "small labels are left out": lambda output, target: of_tokens(output, torch.where(target < 4, -100, target)),
    "limited mean": lambda output, target: of_tokens(output, target).clamp(max=3.4),
    "flooded": lambda output, target: (of_tokens(output, target) - 0.2).abs() + 0.2,
    "squared mean": lambda output, target: of_tokens(output, target).square(),
}
TRICKS.update({name: Trick(where="loss", expected="right", loss=loss) for name, loss in LOSSES.items()})

"""Tricks between blocks, outside of them, and in the loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from helpers.models.token_language import (
    WIDTH,
    Block,
    Language,
    of_tokens,
    trick,
)

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

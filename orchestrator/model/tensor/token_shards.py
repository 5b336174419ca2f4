"""The tokens of a sample, divided over ranks between the divided layers of blocks, which see all of them.

Norms, residuals and whatever else computes each token by itself need only a rank's own tokens. They are gathered before
the columns of a pair, and in place of its sum, each rank gets the sum of its own tokens from the rows. Korthikanti et
al., 2022, https://arxiv.org/abs/2205.05198.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from orchestrator.model.batch import map_leaves
from orchestrator.model.peers import Peers, is_differentiated

AXIS = 1
"""That of the tokens, in tensors whose first axis is that of the samples, and whose last one is that of features."""


@dataclass(frozen=True)
class Tokens:
    """The tokens of the rank number ``index`` of ``count``; the last ones may be zeros that fill up its share."""

    index: int
    count: int
    peers: Peers

    def divide(self, block: nn.Module, *, enters: bool, leaves: bool) -> None:
        """Let a block compute on the own tokens.

        Args:
            block: its first input, and its first output, have tokens.
            enters: whether it is called with all tokens.
            leaves: whether it returns all tokens.
        """

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return with_first((args, kwargs), self._enter)

        def leave(module: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
            return with_first(out, lambda own: _Gathered.apply(own, self, False))

        if enters:
            block.register_forward_pre_hook(enter, with_kwargs=True)
        if leaves:
            block.register_forward_hook(leave)

    def gather_before(self, module: nn.Module) -> None:
        """Let a module see all tokens. Its ranks compute parts of the gradients of these."""

        def gather(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return with_first((args, kwargs), self.all_of)

        module.register_forward_pre_hook(gather, with_kwargs=True)

    def all_of(self, own: Tensor) -> Tensor:
        """Return all tokens, given those of this rank, for what differs between the ranks."""
        whole: Tensor = _Gathered.apply(own, self, True)
        return whole

    def own_sums(self, whole: Tensor) -> Tensor:
        """Return the sums over the ranks of this rank's tokens, given all tokens of one rank."""
        own: Tensor = _Divided.apply(whole, self, True)
        return own

    def _enter(self, whole: Tensor) -> Tensor:
        self.peers.tokens = whole.shape[AXIS]
        own: Tensor = _Divided.apply(whole, self, False)
        return own

    def gathered(self, own: Tensor, length: int) -> Tensor:
        """Return the first ``length`` of the tokens of all ranks."""
        return self.peers.gather(own, self.count, axis=AXIS).narrow(AXIS, 0, length)

    def divided(self, whole: Tensor, *, summed: bool) -> Tensor:
        """Return the own ones of all tokens, summed over the ranks or not."""
        size = -(-whole.shape[AXIS] // self.count)
        if lacking := size * self.count - whole.shape[AXIS]:
            whole = F.pad(whole, (0, 0) * (whole.ndim - 1 - AXIS) + (0, lacking))
        if summed:
            return self.peers.scatter(whole, self.index, self.count, axis=AXIS)
        return whole.narrow(AXIS, self.index * size, size).clone()  # so that the others need no memory


def with_first(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a tree whose first tensor of floating-point numbers has been changed."""
    changed: list[Tensor] = []

    def at(leaf: Any) -> Any:
        if changed or not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            return leaf
        changed.append(change(leaf))
        return changed[0]

    return map_leaves(at, tree)


class _Gathered(torch.autograd.Function):
    """All tokens. Their gradients are parts of a sum on the ranks if ``summed``, and otherwise the same."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, tokens: Tokens, summed: bool) -> Tensor:
        ctx.tokens, ctx.summed = tokens, summed
        if not summed:
            tokens.peers.cross(inside=False)
        return tokens.gathered(own, tokens.peers.tokens)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if is_differentiated(gradient):
            return _Divided.apply(gradient, ctx.tokens, ctx.summed), None, None
        if not ctx.summed:
            ctx.tokens.peers.cross(inside=True)
        return ctx.tokens.divided(gradient, summed=ctx.summed), None, None


class _Divided(torch.autograd.Function):
    """The own tokens, of the sum over the ranks if ``summed``, and otherwise of what is the same on them."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, tokens: Tokens, summed: bool) -> Tensor:
        ctx.tokens, ctx.summed, ctx.length = tokens, summed, whole.shape[AXIS]
        if not summed:
            tokens.peers.cross(inside=True)
        return tokens.divided(whole, summed=summed)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if is_differentiated(gradient):
            return _Gathered.apply(gradient, ctx.tokens, ctx.summed), None, None
        if not ctx.summed:
            ctx.tokens.peers.cross(inside=False)
        return ctx.tokens.gathered(gradient, ctx.length), None, None

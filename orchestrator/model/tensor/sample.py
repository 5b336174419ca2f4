"""One call of a block, with real tensors, that can be made again and again."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.model.batch import map_leaves, tensors_in


@dataclass(frozen=True, kw_only=True)
class BlockCall:
    """What a block is called with.

    Attributes:
        args, kwargs: the arguments. Those tensors that require a gradient get one.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def fresh(self) -> BlockCall:
        """Return the call with tensors, and caches, of its own."""
        args, kwargs = map_leaves(_fresh, (self.args, self.kwargs))
        return BlockCall(args=args, kwargs=kwargs)

    def to(self, dtype: torch.dtype) -> BlockCall:
        """Return the call with its floating-point tensors in ``dtype``."""

        def convert(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
                return leaf
            return leaf.detach().to(dtype).requires_grad_(leaf.requires_grad)

        args, kwargs = map_leaves(convert, (self.args, self.kwargs))
        return BlockCall(args=args, kwargs=kwargs)

    @property
    def inputs(self) -> list[Tensor]:
        """The tensors that get a gradient."""
        return [tensor for tensor in tensors_in((self.args, self.kwargs)) if tensor.requires_grad]

    def run(self, block: nn.Module) -> Any:
        """Return what ``block`` returns; what it does to its arguments is lost."""
        own = self.fresh()
        return block(*own.args, **own.kwargs)


def _fresh(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)
    return copy.deepcopy(leaf)

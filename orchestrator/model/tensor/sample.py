"""One call of a block, that can be made again and again."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from orchestrator.compat.generators import drawing
from orchestrator.model.batch import map_leaves, tensors_in
from orchestrator.model.fake_calls import fake_calls
from orchestrator.model.partial_init import FakeModel

T = TypeVar("T")


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


def seen_calls(
    whole: FakeModel, blocks: Mapping[str, nn.Module], run: Callable[[], T]
) -> tuple[Mapping[str, BlockCall], T]:
    """Return what blocks of a model without memory are first called with by ``run``, and what that returns.

    Args:
        whole: the model.
        blocks: some of its blocks, by their names.
        run: calls the model.

    Raises:
        ValueError: it does not call one of the blocks.
        Exception: whatever ``run`` raises.
    """
    seen: dict[str, BlockCall] = {}

    def hook(name: str) -> Any:
        def see(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if name not in seen:
                seen[name] = BlockCall(args=args, kwargs=kwargs).fresh()

        return see

    with contextlib.ExitStack() as stack:
        for name, block in blocks.items():
            stack.callback(block.register_forward_pre_hook(hook(name), with_kwargs=True).remove)
        stack.enter_context(fake_calls(whole))
        stack.enter_context(drawing(0))
        stack.enter_context(whole.mode)
        found = run()
    if missing := next((name for name in blocks if name not in seen), None):
        raise ValueError(f"{missing} is not called")
    return seen, found


def _fresh(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)
    return copy.deepcopy(leaf)

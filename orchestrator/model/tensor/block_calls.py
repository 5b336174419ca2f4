"""The calls of blocks in a forward pass: what each is called with, and which blocks hand tokens to each other alone."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from orchestrator.compat.generators import drawing
from orchestrator.compat.torch import storage_key
from orchestrator.model.batch import map_leaves, tensors_in
from orchestrator.model.fake_calls import fake_calls
from orchestrator.model.partial_init import FakeModel
from orchestrator.model.tensor.vocabulary import Reads

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class BlockCall:
    """What a block is called with. The call can be made again and again.

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

    def is_in(self, dtype: torch.dtype) -> bool:
        """Return whether a tensor of the call has a type."""
        return any(tensor.dtype == dtype for tensor in tensors_in((self.args, self.kwargs)))

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
    """Return the first arguments of the blocks of a model without memory under ``run``, and the result of ``run``.

    Args:
        whole: the model.
        blocks: some of its blocks, by their names.
        run: calls the model.

    Raises:
        ValueError: it does not call one of the blocks.
        Exception: whatever ``run`` raises.
    """
    with fake_calls(whole), drawing(0), whole.mode:
        return first_calls(blocks, run)


def first_calls(blocks: Mapping[str, nn.Module], run: Callable[[], T]) -> tuple[Mapping[str, BlockCall], T]:
    """Return the first arguments of modules under ``run``, and the result of ``run``.

    Raises:
        ValueError: one of them is not called.
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
        found = run()
    if missing := next((name for name in blocks if name not in seen), None):
        raise ValueError(f"{missing} is not called")
    return seen, found


def _fresh(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)
    return copy.deepcopy(leaf)


@dataclass(frozen=True, kw_only=True)
class Ends:
    """The blocks that get all tokens of a sample, and the blocks that return all of them, by name."""

    enters: tuple[str, ...] = ()
    leaves: tuple[str, ...] = ()


@dataclass
class _Seen:
    """What blocks have done in a forward pass.

    Attributes:
        makers: the block that has computed a tensor, by the tensor's ``id``.
        latest: the block that has last computed the values of some memory, by its key.
        kept: the tensors, so that these numbers stay theirs.
        before: for each call of a block, who has computed its first input; None for others.
        leaves: the blocks whose outputs others need whole.
        running: the number of blocks that are being called.
    """

    makers: dict[int, str] = field(default_factory=dict)
    latest: dict[int, str] = field(default_factory=dict)
    kept: list[Tensor] = field(default_factory=list)
    before: dict[str, list[str | None]] = field(default_factory=dict)
    leaves: set[str] = field(default_factory=set)
    running: int = 0

    def needs(self, tensor: Tensor) -> None:
        """Take note that a tensor is read whole."""
        if (maker := self.latest.get(storage_key(tensor.untyped_storage()))) is not None:
            self.leaves.add(maker)


def ends_of(blocks: Mapping[str, nn.Module], runs: Sequence[Callable[[], Any]]) -> Ends:
    """Return where one of the forward passes that ``runs`` make, and whose outputs they return, needs all tokens."""
    passes = [_seen_in(blocks, run) for run in runs]
    leaves = {name for seen in passes for name in seen.leaves}
    for seen in passes:
        followed = {maker for makers in seen.before.values() for maker in makers if maker is not None}
        leaves |= blocks.keys() - followed
        several = [(name, *makers) for name, makers in seen.before.items() if len(makers) > 1]
        leaves |= {name for names in several for name in names if name}
    enters = {n for seen in passes for n, makers in seen.before.items() if None in makers or {*makers} & leaves}
    return Ends(enters=tuple(sorted(enters)), leaves=tuple(sorted(leaves)))


def _seen_in(blocks: Mapping[str, nn.Module], run: Callable[[], Any]) -> _Seen:
    seen = _Seen()

    def begin(name: str) -> Any:
        def see(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = _floating((args, kwargs))
            maker = seen.makers.get(id(given[0])) if given else None
            seen.before.setdefault(name, []).append(maker)
            for tensor in given if maker is None else given[1:]:
                seen.needs(tensor)
            seen.running += 1

        return see

    def end(name: str) -> Any:
        def see(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
            seen.running -= 1
            for tensor in _floating(out)[:1]:
                seen.makers[id(tensor)] = seen.latest[storage_key(tensor.untyped_storage())] = name
                seen.kept.append(tensor)

        return see

    with contextlib.ExitStack() as stack:
        for name, block in blocks.items():
            stack.callback(block.register_forward_pre_hook(begin(name), with_kwargs=True).remove)
            stack.callback(block.register_forward_hook(end(name)).remove)
        stack.enter_context(Reads(lambda tensor: None if seen.running else seen.needs(tensor)))
        out = run()
    for tensor in tensors_in(out):
        seen.needs(tensor)
    return seen


def _floating(tree: Any) -> list[Tensor]:
    return [tensor for tensor in tensors_in(tree) if tensor.is_floating_point()]

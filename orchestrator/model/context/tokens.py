"""The tokens of a rank: their rows in the tensors of whole samples, and attention to those that other ranks have.

Attention gathers the keys and values of all tokens (Llama 3: Grattafiori et al., 2024,
https://arxiv.org/abs/2407.21783). A rank has one piece from the first half of a sample and one from the second, so that
all have as much to do if a token attends to those before it.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from orchestrator.compat.attention import causal_to_the_end
from orchestrator.compat.generators import own_stream
from orchestrator.compat.torch import FakeTensor
from orchestrator.model.batch import leaves, map_leaves, tensors_in
from orchestrator.model.peers import Peers, is_differentiated

Axes = tuple[int | None, ...]
"""For each leaf of a tree, the axis along which it has a row for each token; None if it has none."""
UNSEEN = -1
"""The axis of a leaf that was no tensor, such as a mask that is not always needed."""


class NotDivisible(ValueError):
    """What a model is called with, or computes, cannot be divided by tokens; the text says why."""


def row_axis(sizes: Sequence[int], others: Sequence[int]) -> int | None:
    """Return the axis along which a tensor has a row for each token, given its shapes for two lengths of the samples.

    None if it has none, or only columns, as masks and biases of keys have.
    """
    axes = [axis for axis, (one, two) in enumerate(zip(sizes, others, strict=True)) if one != two]
    last = len(sizes) - 1
    if not axes or (axes == [last] and last >= 2 and sizes[-2] == 1):
        return None
    if len(axes) > 1 and axes != [last - 1, last]:
        raise NotDivisible(f"a tensor of shape {list(sizes)} has more than one row for each token")
    return axes[0]


def rows_of(whole: Tensor, axis: int, *, index: int, count: int) -> Tensor:
    """Return the rows of the tokens that the rank number ``index`` of ``count`` has."""
    size = whole.shape[axis] // (2 * count)
    starts = (index * size, (2 * count - 1 - index) * size)
    return torch.cat([whole.narrow(axis, start, size) for start in starts], dim=axis)


def in_order(parts: Sequence[Tensor], axis: int) -> Tensor:
    """Return the rows of all ranks in the order of the tokens, which :func:`rows_of` has divided."""
    first, second = zip(*(part.chunk(2, dim=axis) for part in parts), strict=True)
    return torch.cat([*first, *reversed(second)], dim=axis)


@dataclass(eq=False)
class ContextPart:
    """The tokens of one rank.

    Attributes:
        index: the number of the rank.
        count: the number of ranks that divide samples.
        peers: the ranks that have the other tokens.
        length_of: the number of the tensor among the inputs that has the tokens, and their axis.
        length: the tokens of a sample in the present pass.
    """

    index: int
    count: int
    peers: Peers = field(default_factory=Peers)
    length_of: tuple[int, int] = (0, 1)
    length: int = 0
    _apart: int = 0
    _whole_of: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def begin(self, inputs: Any) -> None:
        """Begin a pass with whole samples.

        Raises:
            NotDivisible: their length is no multiple of twice the number of ranks.
        """
        number, axis = self.length_of
        tensors = tensors_in(inputs)
        if number >= len(tensors) or tensors[number].ndim <= axis:
            raise NotDivisible("the batch has no tensor of shape (samples, tokens) where others have one")
        self.length = tensors[number].shape[axis]
        if self.length % (2 * self.count):
            least = -(-self.length // (2 * self.count)) * 2 * self.count
            raise NotDivisible(
                f"samples of {self.length} tokens, no multiple of {2 * self.count}, twice the number of parts; make or "
                f"pad them to {least}"
            )

    @property
    def own(self) -> int:
        """The number of tokens of this rank in the present pass."""
        return self.length // self.count

    def rows(self, tree: Any, axes: Axes | None = None) -> Any:
        """Return a tree with this rank's rows in place of whole tensors.

        Args:
            tree: has whole tensors, and such as have this rank's rows already.
            axes: those of its leaves; None for the second axis of each.
        """
        known = iter(axes if axes is not None else ())

        def cut(leaf: Any) -> Any:
            axis = next(known) if axes is not None else 1
            if not isinstance(leaf, Tensor):
                return leaf
            if axis == UNSEEN:
                axis = leaf.ndim - 2  # as of masks
            if axis is None or not 0 <= axis < leaf.ndim or leaf.shape[axis] != self.length:
                return leaf
            return rows_of(leaf, axis, index=self.index, count=self.count)

        return map_leaves(cut, tree)

    def enter(self, tree: Any, axes: Axes) -> Any:
        """Return what a block is called with, given what it would be with all tokens.

        Raises:
            NotDivisible: there is something else with as many rows as this rank has tokens.
        """
        self._whole_of = {}
        known = iter(axes)

        def cut(leaf: Any) -> Any:
            axis = next(known)
            if not isinstance(leaf, Tensor):
                return leaf
            if axis is None and leaf.is_floating_point() and leaf.ndim > 2 and leaf.shape[-2] == self.own:
                raise NotDivisible(
                    f"is also called with a tensor of shape {list(leaf.shape)}, of as many rows as each worker has "
                    "tokens; make or pad the samples to another length"
                )
            own: Tensor = self.rows([leaf], (axis,))[0]
            if own is not leaf and not leaf.requires_grad:
                self._whole_of[id(own)] = own, leaf
            return own

        return map_leaves(cut, tree)

    def is_whole(self, tree: Any, axes: Axes) -> bool:
        """Return whether a tree has the rows of all ranks; see :meth:`whole`."""
        rows = ((leaf, axis) for leaf, axis in zip(leaves(tree), axes, strict=True) if isinstance(leaf, Tensor))
        return all(axis is None or axis == UNSEEN or leaf.shape[axis] == self.length for leaf, axis in rows)

    def whole(self, tree: Any, axes: Axes) -> Any:
        """Return a tree with the rows of all ranks, which use it for the same. Collective, if it has not these already.

        Args:
            tree: has this rank's rows.
            axes: those of its leaves.
        """
        known = iter(axes)

        def gather(leaf: Any) -> Any:
            axis = next(known, None)
            if not isinstance(leaf, Tensor):
                return leaf
            if axis is None:
                return self.shared(leaf)
            if axis == UNSEEN or leaf.shape[axis] == self.length:
                return leaf
            return self.gathered(leaf, axis, summed=False)

        return map_leaves(gather, tree)

    def all_of(self, tree: Any, axes: Axes) -> Any:
        """Return a tree with the rows of all ranks, which use it for something else each. Collective.

        Args:
            tree: has this rank's rows.
            axes: those of its leaves.
        """
        known = iter(axes)

        def gather(leaf: Any) -> Any:
            axis = next(known)
            if not isinstance(leaf, Tensor):
                return leaf
            if axis == UNSEEN:
                axis = leaf.ndim - 2
            if axis is None or not 0 <= axis < leaf.ndim or leaf.shape[axis] != self.own:
                return leaf
            if id(leaf) in self._whole_of:
                return self._whole_of[id(leaf)][1]
            if leaf.dtype == torch.bool:  # which not every backend gathers
                return self.gathered(leaf.byte(), axis).bool()
            return self.gathered(leaf, axis)

        return map_leaves(gather, tree)

    def shared(self, tensor: Tensor) -> Tensor:
        """Return a tensor that all ranks have; the gradient of each is its share of what all compute alike."""
        if not tensor.requires_grad:
            return tensor
        same: Tensor = _Shared.apply(tensor, self.count)
        return same

    @contextlib.contextmanager
    def all_tokens(self) -> Iterator[None]:
        """Let modules compute all tokens in the block."""
        self._apart += 1
        try:
            yield
        finally:
            self._apart -= 1

    def gathered(self, part: Tensor, axis: int, *, summed: bool = True) -> Tensor:
        """Return the rows of all ranks; ``summed``: which use them for something else each. Collective."""
        whole: Tensor = _Gathered.apply(part, axis, summed, self)
        return whole

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        """Return what ``scaled_dot_product_attention`` returns for this rank's queries. Collective.

        Raises:
            NotDivisible: the mask is not that of whole samples.
        """
        attend: Callable[..., Tensor] = F.scaled_dot_product_attention
        own = self.own
        if self._apart or key.shape[-2] != own or query.shape[-2] != own:  # not between a rank's tokens
            return attend(query, key, value, attn_mask, dropout_p, is_causal, **options)
        self._check_mask(attn_mask)
        key, value = self.gathered(key, key.ndim - 2), self.gathered(value, value.ndim - 2)
        with self.drawing(query, dropout_p):
            if not is_causal:
                return attend(query, key, value, attn_mask, dropout_p, **options)
            return self._causal_attention(query, key, value, dropout_p, **options)

    def multi_head_attention(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Any:
        """Return what ``multi_head_attention_forward`` returns for this rank's queries. Collective.

        Each rank projects the keys and values of all tokens.

        Raises:
            NotDivisible: the mask is not that of whole samples.
        """
        attend: Callable[..., Any] = F.multi_head_attention_forward
        if self._apart or not key.shape[0] == value.shape[0] == query.shape[0] == self.own:
            return attend(query, key, value, *args, **options)
        given = inspect.signature(attend).bind(query, key, value, *args, **options)
        given.apply_defaults()
        mask = given.arguments["attn_mask"]
        if mask is None and given.arguments["is_causal"]:
            raise NotDivisible("has no mask that says which tokens come before others")
        self._check_mask(mask)
        given.arguments["is_causal"] = False  # the mask is that of this rank's tokens
        given.arguments["key"] = self.gathered(key, 0)
        given.arguments["value"] = given.arguments["key"] if value is key else self.gathered(value, 0)
        with self.drawing(query, given.arguments["dropout_p"] if given.arguments["training"] else 0.0):
            return attend(*given.args, **given.kwargs)

    def _check_mask(self, mask: Tensor | None) -> None:
        if mask is not None and (mask.shape[-1] not in (1, self.length) or mask.shape[-2] not in (1, self.own)):
            raise NotDivisible("makes a mask of the tokens that it is called with; make it before the blocks")

    def dropout(self, tensor: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        """Return what ``dropout`` returns; this rank draws its own numbers for its rows."""
        with self.drawing(tensor, p if self.own in tensor.shape[1:-1] and not self._apart else 0.0):
            return F.dropout(tensor, p, training, inplace)

    def drawing(self, rows: Tensor, probability: float) -> contextlib.AbstractContextManager[None]:
        """Return a context in which this rank draws its own numbers, if it draws any."""
        if not probability or isinstance(rows, FakeTensor):
            return contextlib.nullcontext()
        return own_stream(rows.device, self.index)

    def _causal_attention(self, query: Tensor, key: Tensor, value: Tensor, dropout_p: float, **options: Any) -> Tensor:
        attend: Callable[..., Tensor] = F.scaled_dot_product_attention
        outputs, size = [], self.own // 2
        for piece, rows in zip((self.index, 2 * self.count - 1 - self.index), query.chunk(2, -2), strict=True):
            seen = (piece + 1) * size
            before = key[..., :seen, :], value[..., :seen, :]
            if isinstance(rows, FakeTensor):  # which cannot have such a mask, and keep as much
                outputs.append(attend(rows, *before, None, dropout_p, True, **options))
            else:
                outputs.append(attend(rows, *before, causal_to_the_end(size, seen), dropout_p, **options))
        return torch.cat(outputs, -2)


class _Gathered(torch.autograd.Function):
    """The rows of all ranks, in the order of the tokens. The gradient of a rank's rows is on it, or a sum over all."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, axis: int, summed: bool, context: ContextPart) -> Tensor:
        ctx.axis, ctx.summed, ctx.context = axis, summed, context
        flat = context.peers.gather(part.contiguous().flatten(), context.count, axis=0)
        return in_order(flat.unflatten(0, (context.count, *part.shape)).unbind(), axis)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        if is_differentiated(gradient):
            raise NotDivisible("computes a gradient that is differentiated again, of which each worker has a part")
        context: ContextPart = ctx.context
        index, count = context.index, context.count
        if not ctx.summed:
            return rows_of(gradient, ctx.axis, index=index, count=count), None, None, None
        parts = torch.stack([rows_of(gradient, ctx.axis, index=i, count=count) for i in range(count)])
        return context.peers.scatter(parts, index, count, axis=0)[0], None, None, None


class _Shared(torch.autograd.Function):
    """A tensor that ``count`` ranks have. The gradients of all are a sum."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, count: int) -> Tensor:
        ctx.count = count
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient / ctx.count, None


def shapes_in(tree: Any) -> list[tuple[int, ...] | None]:
    """Return the shape of each leaf of a tree; None for what is no tensor."""
    return [tuple(leaf.shape) if isinstance(leaf, Tensor) else None for leaf in leaves(tree)]


def axes_of(
    one: Sequence[tuple[int, ...] | None], two: Sequence[tuple[int, ...] | None], lengths: tuple[int, int]
) -> Axes:
    """Return the axes of the leaves of a tree, given their shapes for two lengths of the samples.

    Raises:
        NotDivisible: the trees differ in more than sizes.
    """

    def axes() -> Iterator[int | None]:
        for first, second in zip(one, two, strict=True):
            if first is None or second is None:
                yield UNSEEN
            elif len(first) != len(second):
                raise NotDivisible("what the blocks are called with has other axes in shorter samples")
            else:
                axis = row_axis(first, second)
                is_of_tokens = axis is not None and (first[axis], second[axis]) == lengths
                yield axis if is_of_tokens else None

    if len(one) != len(two):
        raise NotDivisible("what the blocks are called with differs in shorter samples")
    return tuple(axes())

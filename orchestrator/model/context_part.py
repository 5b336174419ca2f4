"""A model of which each rank computes some tokens of every sample, together with the ranks that have the others.

The model is called with whole samples, so that it makes positions, masks and embeddings as ever. A block then keeps the
rows of this rank's tokens, of all that it is called with, and whatever follows has these rows alone. Attention needs
the keys and values of all tokens, and gathers them (Llama 3: Grattafiori et al., 2024,
https://arxiv.org/abs/2407.21783). A rank has one piece from the first half of a sample and one from the second, so that
all have as much to do if a token attends to those before it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from orchestrator.compat.attention import causal_to_the_end
from orchestrator.compat.generators import own_stream
from orchestrator.compat.torch import FakeTensor
from orchestrator.model.batch import leaves, map_leaves, tensors_in
from orchestrator.model.repeated_blocks import Block
from orchestrator.model.tensor.peers import Peers

Axes = tuple[int | None, ...]
"""For each leaf of a tree, the axis along which it has a row for each token; None if it has none."""
UNSEEN = -1
"""The axis of a leaf that was no tensor, such as a mask that is not always needed."""
_TOKENS = "_tokens_of_rank"
"""The attribute of a block that has the tokens, the axes of what it is called with, and what is not compiled."""


class NotDivisible(ValueError):
    """What a model is called with, or computes, cannot be divided by tokens; the text says why."""


def sample_length(inputs: Any) -> int:
    """Return the number of tokens in each sample of a batch: the second size of its first tensor that has one.

    Raises:
        NotDivisible: no tensor has one.
    """
    found = next((tensor.shape[1] for tensor in tensors_in(inputs) if tensor.ndim > 1), None)
    if found is None:
        raise NotDivisible("the batch has no tensor of shape (samples, tokens)")
    return found


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
        length: the tokens of a sample in the present pass.
    """

    index: int
    count: int
    peers: Peers = field(default_factory=Peers)
    length: int = 0

    def begin(self, inputs: Any) -> None:
        """Begin a pass with whole samples.

        Raises:
            NotDivisible: their length is no multiple of twice the number of ranks.
        """
        self.length = sample_length(inputs)
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
            axis = next(known)
            if not isinstance(leaf, Tensor) or axis is None or axis == UNSEEN or leaf.shape[axis] == self.length:
                return leaf
            return self.gathered(leaf, axis, summed=False)

        return map_leaves(gather, tree)

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
        if key.shape[-2] != own or query.shape[-2] != own:  # not between tokens
            return attend(query, key, value, attn_mask, dropout_p, is_causal, **options)
        if attn_mask is not None and (
            attn_mask.shape[-1] not in (1, self.length) or attn_mask.shape[-2] not in (1, own)
        ):
            raise NotDivisible("makes a mask of the tokens that it is called with; make it before the blocks")
        key, value = self.gathered(key, key.ndim - 2), self.gathered(value, value.ndim - 2)
        with self.drawing(query, dropout_p):
            if not is_causal:
                return attend(query, key, value, attn_mask, dropout_p, **options)
            return self._causal_attention(query, key, value, dropout_p, **options)

    def dropout(self, tensor: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        """Return what ``dropout`` returns; this rank draws its own numbers for its rows."""
        with self.drawing(tensor, p if self.own in tensor.shape[1:-1] else 0.0):
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
        context: ContextPart = ctx.context
        index, count = context.index, context.count
        if not ctx.summed:
            return rows_of(gradient, ctx.axis, index=index, count=count), None, None, None
        parts = torch.stack([rows_of(gradient, ctx.axis, index=i, count=count) for i in range(count)])
        return context.peers.scatter(parts, index, count, axis=0)[0], None, None, None


class _OfRows(TorchFunctionMode):
    """Lets attention see all tokens, and dropout draw other numbers for the tokens of other ranks."""

    def __init__(self, attention: Callable[..., Tensor], dropout: Callable[..., Tensor]):
        super().__init__()
        self._attention = attention
        self._dropout = dropout

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            func = self._attention
        elif func is F.dropout and _draws(*args, **(kwargs or {})):
            func = self._dropout
        return func(*args, **(kwargs or {}))


def _draws(tensor: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> bool:
    return training and p > 0


def divide_tokens(model: nn.Module, blocks: Mapping[str, Axes], part: ContextPart) -> None:
    """Let the blocks of a model compute the tokens of a rank.

    Args:
        model: the model. The names of its tensors do not change.
        blocks: the axes of what each block is called with, by its name.
        part: the tokens.
    """
    classes: dict[type[nn.Module], type[nn.Module]] = {}
    # Here, because it imports the compiler, which only a model with divided tokens needs.
    uncompiled = (torch.compiler.disable(part.attention), torch.compiler.disable(part.dropout))
    for name, axes in blocks.items():
        block = model.get_submodule(name)
        kind = type(block)
        if kind not in classes:
            classes[kind] = _class_of_rows(kind)
        block.__class__ = classes[kind]
        vars(block)[_TOKENS] = (part, axes, uncompiled)


def _class_of_rows(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a class of blocks that compute the tokens of a rank; also if they compute them again."""

    def of_rows(block: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        part, axes, uncompiled = vars(block)[_TOKENS]
        own_args, own_kwargs = part.rows((args, kwargs), axes)
        with _OfRows(*uncompiled):
            return forward(block, *own_args, **own_kwargs)

    def called(block: Any, *args: Any, **kwargs: Any) -> Any:
        return of_rows(block, kind.forward, *args, **kwargs)

    member = {"__block_around__": of_rows} if issubclass(kind, Block) else {"forward": called}
    return type(kind.__name__, (kind,), {"__module__": kind.__module__, **member})


def shapes_in(tree: Any) -> list[tuple[int, ...] | None]:
    """Return the shape of each leaf of a tree; None for what is no tensor."""
    return [tuple(leaf.shape) if isinstance(leaf, Tensor) else None for leaf in leaves(tree)]


def axes_of(one: Sequence[tuple[int, ...] | None], two: Sequence[tuple[int, ...] | None]) -> Axes:
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
                yield row_axis(first, second)

    if len(one) != len(two):
        raise NotDivisible("what the blocks are called with differs in shorter samples")
    return tuple(axes())

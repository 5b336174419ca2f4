"""A block whose linear layers are divided over several ranks, with plain tensors.

Some layers, the columns, keep a part of their outputs on each rank, and what is computed from these needs no other
rank, up to the layers, the rows, that keep the matching part of their inputs. Their outputs are summed over the ranks.
In the backward pass, the gradients of the inputs of the columns are.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from orchestrator.compat.modules import own_parameters
from orchestrator.compat.torch import adopt_user_state
from orchestrator.model.peers import Peers, is_differentiated
from orchestrator.model.tensor.attention import divide_heads, has_divisible_heads
from orchestrator.model.tensor.heads import HeadCuts
from orchestrator.model.tensor.token_shards import Tokens, with_first
from orchestrator.planning.placement import AxisCut, Box


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Layers of a block, by name, that are divided together: the outputs of the columns, and the inputs of the rows.

    What the ``shared`` ones return feeds the rows too, and every rank computes all of it, as the keys of all heads.
    """

    columns: tuple[str, ...]
    rows: tuple[str, ...]
    shared: tuple[str, ...] = ()

    @property
    def layers(self) -> tuple[str, ...]:
        """The columns and the rows."""
        return (*self.columns, *self.rows)

    @property
    def home(self) -> str:
        """The innermost module that has all that feeds the rows; empty for the block itself."""
        return home_of((*self.columns, *self.shared))

    def __str__(self) -> str:
        beside = f" ({' + '.join(self.shared)} on each worker)" if self.shared else ""
        return f"{' + '.join(self.columns)} -> {' + '.join(self.rows)}{beside}"


@dataclass(frozen=True, kw_only=True)
class BlockParts:
    """How a block is divided.

    Attributes:
        pairs: what is divided.
        cuts: how each divided parameter is cut, by its name in the block.
        attributes: the numbers that a rank divides by the number of parts, such as those of heads: by module, names,
            as ``config.NAME`` for one of the module's own copy of its configuration.
        heads: what is cut with the heads beside the layers.
        wide: the pairs that begin where the module is called that has all their columns. What else is in it computes
            parts of gradients too, such as the keys that all heads share.
        partial: the whole parameters whose gradients on the ranks are parts of a sum.
        sequence: whether a rank computes only its own tokens between the pairs.
    """

    pairs: tuple[Pair, ...]
    cuts: Mapping[str, AxisCut]
    attributes: Mapping[str, Collection[str]] = field(default_factory=dict)
    heads: HeadCuts = field(default_factory=HeadCuts)
    wide: tuple[Pair, ...] = ()
    partial: tuple[str, ...] = ()
    sequence: bool = False


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear layer, or the ``Conv1D`` of transformers; whatever it computes is proven.

    Not if its weight is computed, as by ``weight_norm``.
    """
    return (isinstance(module, nn.Linear) or _is_transposed(module)) and not is_parametrized(module)


def is_parametrized(module: nn.Module) -> bool:
    """Return whether a module is a linear layer whose weight is none of its parameters."""
    return isinstance(module, nn.Linear) and "weight" not in own_parameters(module)


def _is_transposed(module: nn.Module) -> bool:
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"


def output_axis(linear: nn.Module) -> int:
    """Return the axis of the weight of a linear layer that its outputs are along; the inputs are along the other."""
    return 1 if _is_transposed(linear) else 0


Packed = Mapping[str, tuple[int, ...]]
"""The sizes of what follows one another in the outputs of layers, by their names; none of those that are not packed."""


def inner_sizes(block: nn.Module, pair: Pair, packed: Packed) -> list[int]:
    """Return the sizes that are divided: the outputs of each column, packed or not, and the inputs of each row."""
    cuts = cuts_of(block, [pair], packed)
    weights = {name: (cut, block.get_parameter(name).shape[cut.axis]) for name, cut in cuts.items()}
    return [size for cut, whole in weights.values() for size in cut.packed or (whole,)]


def cuts_of(block: nn.Module, pairs: Collection[Pair], packed: Packed) -> dict[str, AxisCut]:
    """Return how each parameter of ``pairs`` is cut, by its name in the block."""
    cuts: dict[str, AxisCut] = {}
    for pair in pairs:
        for name in pair.columns:
            column = block.get_submodule(name)
            if isinstance(column, nn.MultiheadAttention):
                cut = AxisCut(over="tensor", packed=(column.embed_dim,) * 3)
                cuts |= {f"{name}.{of}": cut for of, p in own_parameters(column).items() if p is not None}
                continue
            cuts[f"{name}.weight"] = AxisCut(over="tensor", axis=output_axis(column), packed=packed.get(name, ()))
            if column.bias is not None:
                cuts[f"{name}.bias"] = replace(cuts[f"{name}.weight"], axis=0)
        for name in pair.rows:
            cuts[f"{name}.weight"] = AxisCut(over="tensor", axis=1 - output_axis(block.get_submodule(name)))
    return cuts


@torch.no_grad()
def divide(
    block: nn.Module,
    parts: BlockParts,
    *,
    index: int,
    count: int,
    peers: Peers,
    enters: bool = True,
    leaves: bool = True,
) -> None:
    """Leave the part number ``index`` of ``count`` in a block, which then computes its outputs together with ``peers``.

    The names of its tensors do not change. If a rank computes its own tokens between the pairs, the block is called
    with all of them if it ``enters``, and returns all if it ``leaves``.
    """
    tokens = Tokens(index, count, peers) if parts.sequence else None
    if tokens is not None:
        tokens.divide(block, enters=enters, leaves=leaves)
    for name, cut in parts.cuts.items():
        path, _, attribute = name.rpartition(".")
        owned = own_parameters(block.get_submodule(path))
        whole = owned[attribute]
        assert whole is not None
        owned[attribute] = part_of(whole, cut, index=index, count=count)
    for path, names in parts.attributes.items():
        module = block.get_submodule(path)
        for name in names:
            of, _, attribute = name.rpartition(".")
            owner = copy.copy(getattr(module, of)) if of else module
            setattr(owner, attribute, getattr(owner, attribute) // count)
            if of:
                setattr(module, of, owner)
    parts.heads.apply(block, index=index, count=count, peers=peers)
    for pair in parts.pairs:
        region = _Region(peers, tokens)
        first = block.get_submodule(pair.columns[0])
        if has_divisible_heads(first):
            divide_heads(first, index=index, region=region)
            continue
        home = pair.home
        if tokens is not None and home:
            tokens.gather_before(block.get_submodule(home))
        elif pair in parts.wide:
            block.get_submodule(home).register_forward_pre_hook(region, with_kwargs=True)
        else:
            for name in pair.columns:
                block.get_submodule(name).register_forward_pre_hook(region, with_kwargs=True)
        for name in pair.rows:
            row = block.get_submodule(name)
            row.__class__ = _row_class(type(row))
            assert isinstance(row, _Row)
            row.region = region


def part_of(whole: Tensor, cut: AxisCut, *, index: int, count: int) -> nn.Parameter:
    """Return the part number ``index`` of ``count`` of a parameter."""
    box = cut.box(tuple(whole.shape), index=index, count=count)
    part = whole.detach()[box.slices_in(Box.whole(whole.shape))].clone(memory_format=torch.contiguous_format)
    own = nn.Parameter(part, requires_grad=whole.requires_grad)
    adopt_user_state(own, whole)
    return own


def enter(x: Tensor, peers: Peers) -> Tensor:
    """Return ``x``, which is the same on all ranks, for what differs between them: its gradient is summed."""
    entered: Tensor = _Into.apply(x, peers)
    return entered


def leave(part: Tensor, peers: Peers) -> Tensor:
    """Return the sum of ``part`` over the ranks, for what is the same on all of them."""
    out: Tensor = _OutOf.apply(part, peers)
    return out


class _Region:
    """What lies between the columns and the rows of a pair: the pre-hook of what it begins with, of equal inputs."""

    def __init__(self, peers: Peers, tokens: Tokens | None):
        self.peers = peers
        self._tokens = tokens
        self._entered: list[tuple[Tensor, Tensor]] = []

    def __call__(self, column: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return with_first((args, kwargs), self.enter)

    def enter(self, x: Tensor) -> Tensor:
        """Return what all ranks have alike, or the tokens of all, for what differs between them."""
        for given, entered in self._entered:
            if given is x:
                return entered
        entered = enter(x, self.peers) if self._tokens is None else self._tokens.all_of(x)
        self._entered.append((x, entered))
        return entered

    def leave(self, part: Tensor) -> Tensor:
        """Return the sum of the outputs of a row, of the own tokens if they are divided."""
        self._entered.clear()  # which would keep activations
        return leave(part, self.peers) if self._tokens is None else self._tokens.own_sums(part)


def home_of(layers: Sequence[str]) -> str:
    """Return the name of the innermost module that has all of some layers; empty for the block itself."""
    paths = [name.split(".")[:-1] for name in layers]
    common = itertools.takewhile(lambda names: len({*names}) == 1, zip(*paths, strict=False))
    return ".".join(names[0] for names in common)


class _Row(nn.Module):
    """A row. The class of the layer has become a subclass of this one and of what it was."""

    region: _Region
    weight: Tensor
    bias: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight.T if _is_transposed_row(self) else self.weight
        out = self.region.leave(F.linear(input, weight))
        return out if self.bias is None else out + self.bias.to(out.dtype)


def _is_transposed_row(row: nn.Module) -> bool:
    return not isinstance(row, nn.Linear)


def _row_class(kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (_Row, kind), {"__module__": kind.__module__})


class _Into(torch.autograd.Function):
    """The same on all ranks; the gradients are summed over them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers) -> Tensor:
        ctx.peers = peers
        peers.cross(inside=True)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if is_differentiated(gradient):
            return leave(gradient, ctx.peers), None
        ctx.peers.cross(inside=False)
        return ctx.peers.sum(gradient), None


class _OutOf(torch.autograd.Function):
    """The sum over the ranks, whose gradient is the same on all of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers) -> Tensor:
        ctx.peers = peers
        peers.cross(inside=False)
        return peers.sum(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if is_differentiated(gradient):
            return enter(gradient, ctx.peers), None
        ctx.peers.cross(inside=True)
        return gradient, None

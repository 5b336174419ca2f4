"""A block whose linear layers are divided over several ranks, with plain tensors.

Some layers, the columns, keep a part of their outputs on each rank, and what is computed from these needs no other
rank, up to the layers, the rows, that keep the matching part of their inputs. Their outputs are summed over the ranks.
In the backward pass, the gradients of the inputs of the columns are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from orchestrator.compat.modules import own_parameters
from orchestrator.compat.process_groups import all_gathered, all_reduced
from orchestrator.compat.torch import adopt_user_state


class Peers:
    """The ranks that have the parts of the same layers.

    Attributes:
        group: the ranks; None outside of a generation, where nothing is summed.
        inside: whether this rank is computing what differs between them, in a forward or a backward pass. Compiled code
            does not say.
        waiting: returns a context for each sum that is not made by compiled code.
    """

    group: dist.ProcessGroup | None = None
    inside = False
    waiting: Callable[[], contextlib.AbstractContextManager[None]] | None = None

    def cross(self, *, inside: bool) -> None:
        """Take note that what follows in a pass differs between the ranks, or does not."""
        if not torch.compiler.is_compiling():
            self.inside = inside

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of ``tensor`` over the ranks."""
        return tensor if self.group is None else self._made(all_reduced, tensor, self.group)

    def gather(self, part: Tensor, count: int) -> Tensor:
        """Return the parts of all ``count`` ranks, one after another along the last axis."""
        if self.group is None:
            return torch.cat([part] * count, dim=-1)
        return self._made(all_gathered, part, self.group)

    def _made(
        self, operation: Callable[[Tensor, dist.ProcessGroup], Tensor], tensor: Tensor, group: dist.ProcessGroup
    ) -> Tensor:
        if self.waiting is None or torch.compiler.is_compiling():
            return operation(tensor, group)
        with self.waiting():
            return operation(tensor, group)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Layers of a block, by name, that are divided together: the outputs of the columns, and the inputs of the rows."""

    columns: tuple[str, ...]
    rows: tuple[str, ...]

    @property
    def layers(self) -> tuple[str, ...]:
        """The columns and the rows."""
        return (*self.columns, *self.rows)

    def __str__(self) -> str:
        return f"{' + '.join(self.columns)} -> {' + '.join(self.rows)}"


@dataclass(frozen=True, kw_only=True)
class BlockParts:
    """How a block is divided.

    Attributes:
        pairs: what is divided.
        cuts: the axis along which each divided parameter is cut into equal parts, by its name in the block.
        attributes: the numbers that a rank divides by the number of parts, such as those of heads: by module, names.
        partial: the whole parameters whose gradients on the ranks are parts of a sum.
    """

    pairs: tuple[Pair, ...]
    cuts: Mapping[str, int]
    attributes: Mapping[str, Collection[str]] = field(default_factory=dict)
    partial: frozenset[str] = frozenset()


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear layer as torch computes it, or the ``Conv1D`` of transformers."""
    return type(module).forward is nn.Linear.forward or _is_transposed(module)


def _is_transposed(module: nn.Module) -> bool:
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"


def output_axis(linear: nn.Module) -> int:
    """Return the axis of the weight of a linear layer that its outputs are along; the inputs are along the other."""
    return 1 if _is_transposed(linear) else 0


def inner_sizes(block: nn.Module, pair: Pair) -> list[int]:
    """Return the sizes that are divided: the outputs of each column, and the inputs of each row."""
    axes = {name: output_axis(block.get_submodule(name)) for name in pair.columns}
    axes |= {name: 1 - output_axis(block.get_submodule(name)) for name in pair.rows}
    return [block.get_parameter(f"{name}.weight").shape[axis] for name, axis in axes.items()]


def cuts_of(block: nn.Module, pairs: Collection[Pair]) -> dict[str, int]:
    """Return the axis along which each parameter of ``pairs`` is cut, by its name in the block."""
    cuts = {}
    for pair in pairs:
        for name in pair.columns:
            column = block.get_submodule(name)
            cuts[f"{name}.weight"] = output_axis(column)
            if column.bias is not None:
                cuts[f"{name}.bias"] = 0
        cuts |= {f"{name}.weight": 1 - output_axis(block.get_submodule(name)) for name in pair.rows}
    return cuts


@torch.no_grad()
def divide(block: nn.Module, parts: BlockParts, *, index: int, count: int, peers: Peers) -> None:
    """Leave the part number ``index`` of ``count`` in a block, which then computes its outputs together with ``peers``.

    The names of its tensors do not change.
    """
    for name, axis in parts.cuts.items():
        path, _, attribute = name.rpartition(".")
        owned = own_parameters(block.get_submodule(path))
        whole = owned[attribute]
        assert whole is not None
        owned[attribute] = part_of(whole, axis, index=index, count=count)
    for path, names in parts.attributes.items():
        module = block.get_submodule(path)
        for name in names:
            setattr(module, name, getattr(module, name) // count)
    for pair in parts.pairs:
        region = _Region(peers)
        for name in pair.columns:
            block.get_submodule(name).register_forward_pre_hook(region)
        for name in pair.rows:
            row = block.get_submodule(name)
            row.__class__ = _row_class(type(row))
            assert isinstance(row, _Row)
            row.region = region


def part_of(whole: Tensor, axis: int, *, index: int, count: int) -> nn.Parameter:
    """Return the part number ``index`` of ``count`` equal ones of a parameter along ``axis``."""
    size = whole.shape[axis] // count
    part = whole.detach().narrow(axis, index * size, size).clone(memory_format=torch.contiguous_format)
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
    """What lies between the columns and the rows of a pair: the pre-hook of the columns, which share their inputs."""

    def __init__(self, peers: Peers):
        self.peers = peers
        self._entered: list[tuple[Tensor, Tensor]] = []

    def __call__(self, column: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        for given, entered in self._entered:
            if given is args[0]:
                return (entered, *args[1:])
        entered = enter(args[0], self.peers)
        self._entered.append((args[0], entered))
        return (entered, *args[1:])

    def leave(self, part: Tensor) -> Tensor:
        """Return the sum of the outputs of a row."""
        self._entered.clear()  # which would keep activations
        return leave(part, self.peers)


class _Row(nn.Module):
    """A row. The class of the layer has become a subclass of this one and of what it was."""

    region: _Region
    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.T if _is_transposed_row(self) else self.weight
        out = self.region.leave(F.linear(x, weight))
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
        ctx.peers.cross(inside=True)
        return gradient, None

"""The tensors that flow from one stage of a model to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from orchestrator.compat.torch import is_view, pytree


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """The kind of one tensor at a boundary."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True, kw_only=True)
class Boundary:
    """The values between two stages: tensors and None in nested tuples, lists and dicts.

    Attributes:
        after: the name of the layer that returns the values.
        specs: the kind of each tensor, in order. All micro-batches have the same.
        structure: how the tensors and Nones are nested.
        present: for each leaf of the structure, whether it is a tensor and not None.
    """

    after: str
    specs: tuple[TensorSpec, ...]
    structure: pytree.TreeSpec
    present: tuple[bool, ...]

    @classmethod
    def of(cls, value: Any, *, after: str) -> Boundary:
        """Describe the boundary after the layer ``after``, which returns ``value``.

        Raises:
            ValueError: ``value`` holds something other than tensors and None, or no tensor at all.
        """
        leaves, structure = pytree.tree_flatten(value)
        other = {type(leaf).__name__ for leaf in leaves if leaf is not None and not isinstance(leaf, Tensor)}
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if other or not tensors:
            raise ValueError(
                f"layer {after} returns {' and '.join(sorted(other)) or 'no tensor'}; only tensors in tuples, lists "
                "and dicts can pass from one stage to the next; cut elsewhere with strategy.split"
            )
        return cls(
            after=after,
            specs=tuple(
                TensorSpec(shape=tuple(t.shape), dtype=t.dtype, requires_grad=t.requires_grad) for t in tensors
            ),
            structure=structure,
            present=tuple(leaf is not None for leaf in leaves),
        )

    def examples(self, device: torch.device) -> tuple[Tensor, ...]:
        """Return one uninitialised tensor of each kind on ``device``."""
        return tuple(
            torch.empty(spec.shape, dtype=spec.dtype, device=device, requires_grad=spec.requires_grad)
            for spec in self.specs
        )

    def converted(self, value: Any) -> Any:
        """Return ``value`` with its tensors in the dtypes of :attr:`specs`."""
        dtypes = iter([spec.dtype for spec in self.specs])
        return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(next(dtypes, tensor.dtype)), value)

    def pack(self, value: Any) -> tuple[Tensor, ...]:
        """Return the tensors of ``value``, ready to be sent.

        Raises:
            ValueError: their shapes or dtypes differ from :attr:`specs`.
        """
        tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
        found, planned = [_format(t) for t in tensors], [_format(spec) for spec in self.specs]
        if found != planned:
            raise ValueError(
                f"layer {self.after} returns {', '.join(found)}, but returned {', '.join(planned)} for the first "
                "sample; pad the samples to one length in Job.collate, or use strategy=ddp"
            )
        return tuple(_sendable(t) for t in tensors)

    def unpack(self, tensors: Sequence[Tensor]) -> Any:
        """Nest ``tensors`` as the value that :meth:`pack` received."""
        remaining = iter(tensors)
        return pytree.tree_unflatten([next(remaining) if p else None for p in self.present], self.structure)


def _sendable(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy if a backend cannot send it or a schedule cannot detach it.

    Backends need contiguous memory. Schedules that split the backward pass detach the tensor in place. torch refuses
    this for views, and it must not happen to an input that the stage passes on unchanged.
    """
    is_stage_input = tensor.is_leaf and tensor.requires_grad
    if is_stage_input or is_view(tensor) or not tensor.is_contiguous():
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor


def _format(tensor: Tensor | TensorSpec) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"

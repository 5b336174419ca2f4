"""What flows from one stage of a model to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A tensor that flows."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True, kw_only=True)
class Boundary:
    """Tensors in nested tuples, lists and dicts, which the layer ``after`` returns. None may stand among them."""

    after: str
    specs: tuple[Spec, ...]
    structure: pytree.TreeSpec
    present: tuple[bool, ...]

    @classmethod
    def of(cls, value: Any, *, after: str) -> Boundary:
        """That at which ``value`` flows.

        Raises:
            ValueError: there is something else than tensors in it.
        """
        leaves, structure = pytree.tree_flatten(value)
        strange = {type(leaf).__name__ for leaf in leaves if leaf is not None and not isinstance(leaf, Tensor)}
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if strange or not tensors:
            raise ValueError(
                f"layer {after} returns {' and '.join(sorted(strange)) or 'no tensor'}; between stages only tensors "
                "can flow, in tuples, lists and dicts; cut elsewhere with strategy.split"
            )
        return cls(
            after=after,
            specs=tuple(Spec(shape=tuple(t.shape), dtype=t.dtype, requires_grad=t.requires_grad) for t in tensors),
            structure=structure,
            present=tuple(leaf is not None for leaf in leaves),
        )

    def examples(self, device: torch.device) -> tuple[Tensor, ...]:
        """A tensor of each kind, without defined values."""
        return tuple(
            torch.empty(spec.shape, dtype=spec.dtype, device=device, requires_grad=spec.requires_grad)
            for spec in self.specs
        )

    def pack(self, value: Any) -> tuple[Tensor, ...]:
        """The tensors of ``value``, ready to be sent.

        Raises:
            ValueError: they are not those that were planned for.
        """
        tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
        found, planned = [_shown(t) for t in tensors], [_shown(spec) for spec in self.specs]
        if found != planned:
            raise ValueError(
                f"layer {self.after} returns {', '.join(found)}, where {', '.join(planned)} was planned with the first "
                "sample: all micro-batches must have one shape; pad the samples to one length in job.collate"
            )
        return tuple(_sendable(t) for t in tensors)

    def unpack(self, tensors: Sequence[Tensor]) -> Any:
        """The value that :meth:`pack` was given, of ``tensors``."""
        remaining = iter(tensors)
        return pytree.tree_unflatten([next(remaining) if p else None for p in self.present], self.structure)


def _sendable(tensor: Tensor) -> Tensor:
    """Backends send what is contiguous; schedules that halve the backward pass detach it, which has to be possible."""
    passed_on = tensor.is_leaf and tensor.requires_grad
    if passed_on or tensor._is_view() or not tensor.is_contiguous():
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor


def _shown(tensor: Tensor | Spec) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"

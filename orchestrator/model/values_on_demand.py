"""Parameters without memory, which get their values when an operation uses them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from orchestrator.compat.torch import (
    TorchDispatchMode,
    pytree,
    storage_key,
    written_tensors,
)


class ChangedValueError(Exception):
    """A pass changes a parameter, which it would lose with the parameter's memory."""


class ValuesOnDemand(TorchDispatchMode):
    """Gives parameters values in forward and backward passes, and frees the memory of those used longest ago.

    The parameters stay the same objects, so that what autograd keeps of them has values when a backward pass needs it.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], fill: Callable[[Mapping[str, Tensor]], None], *, most_bytes: int
    ):
        """Take parameters that are :func:`without_memory`.

        Args:
            parameters: by name.
            fill: gives tensors of these names their values.
            most_bytes: how much memory the parameters may have, unless one operation needs more.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._fill = fill
        self._most = most_bytes
        # Other tensors in the same memory, because what is written there must not count as a change of the parameters.
        self._values = {name: parameter.detach().data for name, parameter in parameters.items()}
        self._sizes = {name: _bytes_of(values) for name, values in self._values.items()}
        self._names = {storage_key(values.untyped_storage()): name for name, values in self._values.items()}
        self._present: dict[str, None] = {}  # in the order of their last use

    def forget(self) -> None:
        """Free the memory of all parameters."""
        for name in [*self._present]:
            self._free(name)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        used = {self._name(leaf) for leaf in pytree.tree_leaves((args, kwargs))} - {None}
        if used:
            for tensor in written_tensors(func, args, kwargs):
                if (name := self._name(tensor)) is not None:
                    raise ChangedValueError(f"forward() changes the parameter {name}")
            self._provide([name for name in used if name is not None])  # for views too, which check their bounds
        return func(*args, **kwargs)

    def _name(self, value: Any) -> str | None:
        """Return the name of the parameter in whose memory a tensor is; None if it is in none."""
        if not isinstance(value, Tensor) or value.layout is not torch.strided:
            return None
        return self._names.get(storage_key(value.untyped_storage()))

    @torch.no_grad()
    def _provide(self, names: list[str]) -> None:
        missing = [name for name in names if name not in self._present]
        for name in names:
            self._present[name] = self._present.pop(name, None)
        free = self._most - sum(self._sizes[name] for name in self._present)
        for name in [name for name in self._present if name not in names]:
            if free >= 0:
                break
            free += self._sizes[name]
            self._free(name)
        for name in missing:
            self._values[name].untyped_storage().resize_(self._sizes[name])
        if missing:
            self._fill({name: self._values[name] for name in missing})

    def _free(self, name: str) -> None:
        del self._present[name]
        self._values[name].untyped_storage().resize_(0)


def without_memory(like: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on ``device`` with the shape, strides and dtype of another one, which has no memory yet."""
    tensor = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device=device)
    tensor.untyped_storage().resize_(0)
    return tensor


def _bytes_of(tensor: Tensor) -> int:
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize

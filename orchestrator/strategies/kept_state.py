"""What passes through a model may change of it, kept to be put back: tensors, buffers, attributes and flags."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.compat.modules import own_buffers
from orchestrator.compat.torch import copies_of, copy_all

_OF_TORCH = frozenset(vars(nn.Module()))


class KeptState:
    """The state of modules and of other objects, as it is now."""

    def __init__(self, modules: Iterable[nn.Module], parameters: Iterable[Tensor], *, others: Sequence[object] = ()):
        """Keep copies.

        Args:
            modules: with all that is below them. Their buffers and attributes are kept.
            parameters: those whose values are kept.
            others: objects whose attributes are kept.
        """
        every = dict.fromkeys(inner for module in modules for inner in module.modules())
        of_modules = [own for module in every if isinstance(own := own_buffers(module), dict)]  # TorchScript has others
        self._buffers = [(own, dict(own)) for own in of_modules]
        buffers = (buffer for _, own in self._buffers for buffer in own.values() if buffer is not None)
        self._trained = {parameter: parameter.requires_grad for parameter in dict.fromkeys(parameters)}
        self._tensors = [tensor.detach() for tensor in (*self._trained, *dict.fromkeys(buffers))]
        self._copies = copies_of(self._tensors)
        attributes = [_Attributes(vars(owner)) for owner in (*every, *others) if hasattr(owner, "__dict__")]
        self._attributes = attributes

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back."""
        for own, before in self._buffers:
            own.clear()
            own.update(before)
        for attributes in self._attributes:
            attributes.restore()
        for (parameter, trained), values in zip(self._trained.items(), self._tensors, strict=False):
            parameter.requires_grad_(trained)
            if parameter.data_ptr() != values.data_ptr():  # it has been given other memory
                parameter.data = values
        copy_all(self._copies, to=self._tensors)


class _Attributes:
    """The attributes of an object, and the contents of containers among them."""

    def __init__(self, own: dict[str, Any]):
        self._own = own
        self._before = {name: value for name, value in own.items() if name not in _OF_TORCH}
        containers = [v for v in self._before.values() if type(v) in (list, dict, set, deque) or _is_array(v)]
        self._contents = [(container, container.copy()) for container in containers]

    def restore(self) -> None:
        for name in self._own.keys() - self._before.keys() - _OF_TORCH:
            del self._own[name]
        self._own.update(self._before)
        for container, content in self._contents:
            if _is_array(container):
                container[...] = content
                continue
            container.clear()
            getattr(container, "extend" if isinstance(container, (list, deque)) else "update")(content)


def _is_array(value: object) -> bool:
    """Return whether a value is an array of NumPy, which need not be installed."""
    return type(value).__module__ == "numpy" and type(value).__name__ == "ndarray"

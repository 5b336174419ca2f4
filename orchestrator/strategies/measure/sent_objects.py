"""Objects of the user on their way between ranks: pickled, but nothing that arrives can call other code.

Somebody who reaches the ports of a process group could send a pickle of their own. So a rank loads only plain data,
classes of the module of the object, and what it would pickle itself.
"""

from __future__ import annotations

import io
import pickle
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from orchestrator.compat.torch import as_bytes

Names = frozenset[tuple[str, str]]
"""Functions and classes, each by its module and its name there."""


def pickled(value: Any) -> tuple[bytes, Names]:
    """Return ``value`` as bytes, with tensors as those of a CPU, and what is called to load it.

    Raises:
        Exception: it cannot be pickled.
    """
    buffer = io.BytesIO()
    pickler = _Pickler(buffer, protocol=5)
    pickler.dump(value)
    return buffer.getvalue(), frozenset(pickler.names)


def unpickled(data: bytes, names: Collection[tuple[str, str]], *, module: str) -> Any:
    """Return the value of which ``data`` was made.

    Args:
        data: the first result of :func:`pickled` on another rank.
        names: what may be called, besides what plain data needs.
        module: whose classes may be called too.

    Raises:
        pickle.UnpicklingError: it would call something else.
    """
    unpickler = _Unpickler(io.BytesIO(data))
    unpickler.names, unpickler.module = _PLAIN | frozenset(names), module
    return unpickler.load()


class _Pickler(pickle.Pickler):
    def __init__(self, file: Any, protocol: int):
        super().__init__(file, protocol)
        self.names: set[tuple[str, str]] = set()

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Tensor):  # without the rest of the memory that a view is a part of
            data = as_bytes(obj.detach().cpu()).numpy().tobytes()
            return _tensor, (data, str(obj.dtype).removeprefix("torch."), tuple(obj.shape))
        if isinstance(obj, (type, FunctionType, BuiltinFunctionType)):
            self.names.add((obj.__module__, obj.__qualname__))
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    names: Names
    module: str

    def find_class(self, module: str, name: str, /) -> Any:
        if (module, name) not in self.names:
            found = super().find_class(module, name) if module == self.module else None
            if not isinstance(found, type) or found.__module__ != module:
                raise pickle.UnpicklingError(f"it holds a {module}.{name}, which is no plain data")
        return super().find_class(module, name)


def _tensor(data: bytes, dtype: str, shape: tuple[int, ...]) -> Tensor:
    made = torch.empty(shape, dtype=getattr(torch, dtype))
    if data:
        as_bytes(made).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return made


_COLLECTIONS: tuple[Any, ...] = (Counter("a"), OrderedDict(), defaultdict(list), defaultdict(int), deque())
_PLAIN = pickled([*_COLLECTIONS, 1j, np.zeros(2), np.ones(2)[0], torch.zeros(1)])[1]

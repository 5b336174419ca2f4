"""What Python code remembers from one call to the next, where its attributes, its class, closures and globals show it.

A recorded forward pass repeats what one call of the code between the submodules did. Code that behaves otherwise at a
later step has to remember something from the steps before. So a comparison of this memory before and after a call finds
it, at any step.
"""

from __future__ import annotations

import contextlib
import itertools
import types
from collections import deque
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from orchestrator.compat.modules import hooks_of

DEPTH = 3
"""Objects in objects that are followed."""
ITEMS = 64
"""Items of a container that are looked at, besides their number."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_ITERATORS = (itertools.count, itertools.repeat)
_NOT_FOLLOWED = (nn.Module, Tensor, type, types.ModuleType)
_LIBRARIES = ("torch", "logging")


def python_state(module: nn.Module) -> dict[str, Any]:
    """Return the numbers, texts and sizes of containers that the code of ``module`` itself can change, by their path.

    Tensors and submodules are left out: these are compared, and run as they are. Of functions that the code calls,
    those in its own files are followed.
    """
    found, visited = dict(_values("", vars(module), DEPTH)), set[types.FunctionType]()
    for kind in type(module).__mro__:
        if not _is_of_library(kind.__module__):
            found |= _values(kind.__name__, vars(kind), DEPTH - 1)
            for function in vars(kind).values():
                found |= _of_function(function, visited)
    own = (vars(module).get("forward"), *hooks_of(module))
    for function in own:
        found |= _of_function(function, visited)
    return found


def _of_function(function: Any, visited: set[types.FunctionType]) -> Iterator[tuple[str, Any]]:
    """Yield what a function, and the functions of its file that it calls, find in their closures and globals."""
    function = getattr(function, "__func__", function)
    if not isinstance(function, types.FunctionType) or function in visited or _is_of_library(function.__module__):
        return
    visited.add(function)
    names = function.__code__.co_names
    seen = {name: function.__globals__[name] for name in names if name in function.__globals__}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # it has no value yet
            seen[name] = cell.cell_contents
    for name, value in seen.items():
        if isinstance(value, types.FunctionType):
            if value.__module__ == function.__module__:
                yield from _of_function(value, visited)
        else:
            yield from _value(f"{function.__module__}.{name}", value, DEPTH - 1)


def _values(prefix: str, attributes: Any, depth: int) -> Iterator[tuple[str, Any]]:
    for name, value in list(attributes.items())[:ITEMS]:
        yield from _value(f"{prefix}.{name}" if prefix else str(name), value, depth)


def _value(name: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    if isinstance(value, _PLAIN):
        yield name, value
    elif isinstance(value, _ITERATORS):
        yield name, repr(value)
    elif isinstance(value, (list, tuple, set, deque, dict)):
        yield name, len(value)
        items = value if isinstance(value, dict) else dict(enumerate(itertools.islice(value, ITEMS)))
        if depth and not isinstance(value, set):
            yield from _values(name, items, depth - 1)
    elif depth and isinstance(value, types.GeneratorType) and value.gi_frame is not None:
        yield from _values(name, {"line": value.gi_frame.f_lasti, **value.gi_frame.f_locals}, depth - 1)
    elif depth and not isinstance(value, _NOT_FOLLOWED) and not _is_of_library(type(value).__module__):
        slots = {s: getattr(value, s) for s in getattr(type(value), "__slots__", ()) if hasattr(value, s)}
        yield from _values(name, {**slots, **getattr(value, "__dict__", {})}, depth - 1)


def _is_of_library(module: str | None) -> bool:
    return module is not None and module.split(".")[0] in _LIBRARIES

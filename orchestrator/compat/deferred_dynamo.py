"""Spare a worker the compiler that it does not use.

Making any optimizer imports ``torch._dynamo``, and with it inductor and sympy: over two seconds of
processor time in every worker, at every start and every recovery, for calls that do nothing in
eager mode. :func:`install` puts a stand-in in its place that answers these calls. Whoever asks for
anything else, ``torch.compile`` say, gets the real module, loaded at that moment.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

_NAME = "torch._dynamo"
_CONFIG = "torch._dynamo.config"  # fake tensors read it; it does without the rest of the package


def install() -> None:
    """Put the stand-in in place, unless the real module is there already."""
    if _NAME in sys.modules:
        return
    known = {
        "graph_break": lambda msg="": None,
        "disable": _disable,
        # DDP asks whether the compiler replaces its reducer; a new process group clears a cache.
        "utils": _StandIn(f"{_NAME}.utils", get_optimize_ddp_mode=lambda: "ddp_optimizer"),
        "trace_rules": _StandIn(f"{_NAME}.trace_rules", clear_lru_cache=lambda: None),
    }
    sys.modules[_NAME] = torch._dynamo = _StandIn(_NAME, **known)
    sys.meta_path.insert(0, _SubmoduleFinder())


class _StandIn(types.ModuleType):
    """A module with a few names of its own; any other is looked up in the real one.

    But for ``__file__``: ``inspect`` asks every module for it, which is no reason to load one.
    """

    def __init__(self, name: str, **known: Any):
        super().__init__(name)
        self.__path__: list[str] = []
        self.__dict__.update(known)

    def __getattr__(self, name: str) -> Any:
        if name == "__file__":
            raise AttributeError(name)
        return getattr(_real(self.__name__), name)


class _SubmoduleFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """``import torch._dynamo.config`` and the like: the real package first, then its submodule, once."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(f"{_NAME}.") or not _in_place():
            return None
        if fullname == _CONFIG:
            return importlib.util.spec_from_file_location(fullname, Path(torch.__file__).parent / "_dynamo/config.py")
        _real(fullname)
        return importlib.util.spec_from_loader(fullname, self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: types.ModuleType) -> None:
        """The module has run already."""


def _in_place() -> bool:
    return isinstance(sys.modules.get(_NAME), _StandIn)


def _real(name: str) -> types.ModuleType:
    if _in_place():
        del sys.modules[_NAME]
        del torch._dynamo
        importlib.import_module(_NAME)
        if _CONFIG in sys.modules:
            torch._dynamo.config = sys.modules[_CONFIG]
    return importlib.import_module(name)


def _disable(fn: Callable[..., Any], *args: Any, **options: Any) -> Callable[..., Any]:
    """``torch._dynamo.disable``: torch keeps the result for good, so it looks again at every call."""

    def run(*values: Any, **named: Any) -> Any:
        if _in_place():
            return fn(*values, **named)
        return _real(_NAME).disable(fn, *args, **options)(*values, **named)

    return run

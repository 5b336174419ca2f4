"""A stand-in for ``torch._dynamo`` that loads the real module on demand.

The constructor of any optimizer imports ``torch._dynamo``, and with it inductor and sympy. This takes over two seconds
of CPU time in every worker, at each start and each recovery, for calls that do nothing in eager mode.
:func:`install` registers a stand-in that answers these calls. Access to any other name, for example by
``torch.compile``, loads the real module at that moment.

Checked with torch 2.11, 2.13 and 2.15. ``tests/unit/compat/test_deferred_dynamo.py`` fails if eager training asks for
a name that the stand-in does not have.
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
_CONFIG = "torch._dynamo.config"  # fake tensors read it; it does not need the rest of the package


def install() -> None:
    """Register the stand-in in ``sys.modules``, unless the real module is loaded already."""
    if _NAME in sys.modules:
        return
    answers = {
        "graph_break": lambda msg="": None,
        "disable": _disable,
        # DDP asks whether the compiler replaces its reducer. A new process group clears a cache.
        "utils": _StandIn(f"{_NAME}.utils", get_optimize_ddp_mode=lambda: "ddp_optimizer"),
        "trace_rules": _StandIn(f"{_NAME}.trace_rules", clear_lru_cache=lambda: None),
    }
    sys.modules[_NAME] = torch._dynamo = _StandIn(_NAME, **answers)
    sys.meta_path.insert(0, _SubmoduleFinder())


def uninstall() -> None:
    """Remove the stand-in, so that the next import takes the real module; do nothing if that is loaded already."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _SubmoduleFinder)]
    if _is_deferred():
        del sys.modules[_NAME]
        del torch._dynamo


class _StandIn(types.ModuleType):
    """A module that has ``answers`` as its attributes and takes all others from the real module.

    ``__file__`` is missing, because ``inspect`` reads it from every module and must not load the real one.
    """

    def __init__(self, name: str, **answers: Any):
        super().__init__(name)
        self.__path__: list[str] = []
        self.__dict__.update(answers)

    def __getattr__(self, name: str) -> Any:
        if name == "__file__":
            raise AttributeError(name)
        return getattr(_load_real(self.__name__), name)


class _SubmoduleFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports submodules, such as ``torch._dynamo.utils``, after the real package.

    ``torch._dynamo.config`` is imported without the package.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(f"{_NAME}.") or not _is_deferred():
            return None
        if fullname == _CONFIG:
            return importlib.util.spec_from_file_location(fullname, Path(torch.__file__).parent / "_dynamo/config.py")
        _load_real(fullname)
        return importlib.util.spec_from_loader(fullname, self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing: :meth:`find_spec` has executed the module."""


def _is_deferred() -> bool:
    return isinstance(sys.modules.get(_NAME), _StandIn)


def _load_real(name: str) -> types.ModuleType:
    """Replace the stand-in by the real package if necessary, and return its module ``name``."""
    if _is_deferred():
        del sys.modules[_NAME]
        del torch._dynamo
        importlib.import_module(_NAME)
        if _CONFIG in sys.modules:
            torch._dynamo.config = sys.modules[_CONFIG]
    return importlib.import_module(name)


def _disable(fn: Callable[..., Any], *args: Any, **options: Any) -> Callable[..., Any]:
    """Stand in for ``torch._dynamo.disable``. torch keeps the result, so the result checks for the compiler itself."""

    def run(*values: Any, **named: Any) -> Any:
        if _is_deferred():
            return fn(*values, **named)
        return _load_real(_NAME).disable(fn, *args, **options)(*values, **named)

    return run

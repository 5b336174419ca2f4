"""Strategies by name. Each has a file ``conf/strategy/<name>.yaml`` and a module ``strategies/<family>/<name>.py``."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from orchestrator.compat import deferred_dynamo
from orchestrator.config.schema import StrategyConfig
from orchestrator.strategies.base import Strategy

S = TypeVar("S", bound=type[Strategy])

_STRATEGIES: dict[str, type[Strategy]] = {}


def register(name: str) -> Callable[[S], S]:
    """Register the decorated class as the strategy ``name``, which must also be the name of its module or package."""

    def add(cls: S) -> S:
        _STRATEGIES[name] = cls
        return cls

    return add


def load(name: str) -> type[Strategy]:
    """Return the strategy ``name``, importing its module but not the modules of other strategies.

    Raises:
        LookupError: there is no such module, or it does not register the strategy.
    """
    deferred_dynamo.install()  # otherwise an optimizer or a pipeline would import torch._dynamo
    if name not in _STRATEGIES:
        folder = Path(__file__).parent
        found = [*folder.glob(f"*/{name}.py"), *folder.glob(f"*/{name}/__init__.py")]
        if len(found) != 1:
            raise LookupError(f"strategy={name}: expected one module strategies/<family>/{name}.py, found {len(found)}")
        path = ".".join(found[0].relative_to(folder).with_suffix("").parts).removesuffix(".__init__")
        importlib.import_module(f"{__package__}.{path}")
    return _STRATEGIES[name]


def config_class(name: str) -> type[StrategyConfig]:
    """Return the dataclass of the keys of the strategy ``name``. Raises like :func:`load`."""
    return load(name).config_class

"""Strategies by name. Each has a file ``conf/strategy/<name>.yaml``, and a class of rules in one of ``MODULES``."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from orchestrator.strategies.keys import BY_STRATEGY, PRESETS, keys_of

if TYPE_CHECKING:
    from orchestrator.strategies.rules import Rules

MODULES: Mapping[str, str] = {
    **dict.fromkeys(PRESETS, "presets"),
    "dp": "replicated.dp",
    "hogwild": "asynchronous.hogwild",
    "locked_sgd": "asynchronous.hogwild",
    "parameter_server": "asynchronous.parameter_server.strategy",
    "auto": "auto",
    "script": "external.script",
}
"""The module of each strategy. What is in the others is not imported for it."""

S = TypeVar("S", bound="type[Rules[Any]]")

_STRATEGIES: dict[str, type[Rules[Any]]] = {}


def register(*names: str) -> Callable[[S], S]:
    """Register the decorated class as the strategies ``names``, which ``MODULES`` and ``BY_STRATEGY`` have too."""

    def add(cls: S) -> S:
        _STRATEGIES.update(dict.fromkeys(names, cls))
        return cls

    return add


def load(name: str) -> type[Rules[Any]]:
    """Return the strategy ``name``. Raises LookupError if there is none."""
    from orchestrator.compat import deferred_dynamo  # imports torch, which the keys alone do not need

    deferred_dynamo.install()  # otherwise an optimizer or a pipeline would import torch._dynamo
    if name not in _STRATEGIES:
        if name not in MODULES:
            raise LookupError(f"strategy={name}: not in strategies/registry.py")
        importlib.import_module(f"{__package__}.{MODULES[name]}")
    return _STRATEGIES[name]


def config_class(name: str) -> type[Any]:
    """Return a dataclass of the keys that the strategy ``name`` has. Raises KeyError if there is none."""
    return keys_of(name) if name in PRESETS else BY_STRATEGY[name]

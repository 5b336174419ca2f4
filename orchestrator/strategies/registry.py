"""Strategies by name. Each has a file ``conf/strategy/<name>.yaml``, and a class of rules.

The core has its own; those of a feature are in the module ``strategies`` of its folder.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from orchestrator import features
from orchestrator.config.schema import StrategyConfig
from orchestrator.strategies.keys import PRESETS, keys_of

if TYPE_CHECKING:
    from orchestrator.strategies.rules import Rules

_OWN: Mapping[str, tuple[type[StrategyConfig], str]] = {
    name: (keys, f"{found.__package__}.{module}")
    for found in features.modules("strategies")
    for name, (keys, module) in found.STRATEGIES.items()
}
"""The keys of each strategy that is no preset, and its module, which is imported for it alone."""
NAMES = (*PRESETS, *_OWN)

S = TypeVar("S", bound="type[Rules[Any]]")

_STRATEGIES: dict[str, type[Rules[Any]]] = {}


def register(*names: str) -> Callable[[S], S]:
    """Register the decorated class as the strategies ``names``, which :data:`NAMES` has too."""

    def add(cls: S) -> S:
        _STRATEGIES.update(dict.fromkeys(names, cls))
        return cls

    return add


def load(name: str) -> type[Rules[Any]]:
    """Return the strategy ``name``. Raises LookupError if there is none."""
    from orchestrator.compat import deferred_dynamo  # imports torch, which the keys alone do not need

    deferred_dynamo.install()  # otherwise an optimizer or a pipeline would import torch._dynamo
    if name not in _STRATEGIES:
        if name not in NAMES:
            raise LookupError(f"strategy={name}: not in strategies/registry.py")
        importlib.import_module(f"{__package__}.presets" if name in PRESETS else _OWN[name][1])
    return _STRATEGIES[name]


def config_class(name: str) -> type[Any]:
    """Return a dataclass of the keys that the strategy ``name`` has. Raises KeyError if there is none."""
    return keys_of(name) if name in PRESETS else _OWN[name][0]

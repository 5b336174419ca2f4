"""Strategies by name. Each has a file ``conf/strategy/<name>.yaml``, and a class of rules in one of ``MODULES``."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from orchestrator.config.schema import StrategyConfig
from orchestrator.strategies.keys import BY_STRATEGY

if TYPE_CHECKING:
    from orchestrator.strategies.rules import Rules

MODULES: Mapping[str, str] = {
    "single": "presets.replicas",
    "ddp": "presets.replicas",
    "fsdp": "presets.shards",
    "hsdp": "presets.shards",
    "model_parallel": "presets.pipelines",
    "pipeline": "presets.pipelines",
    "ddp_pipeline": "presets.pipelines",
    "fsdp_pipeline": "presets.pipelines",
    "mesh": "presets.product",
    "dp": "replicated.dp",
    "hogwild": "asynchronous.hogwild",
    "locked_sgd": "asynchronous.hogwild",
    "parameter_server": "asynchronous.parameter_server.strategy",
    "auto": "tuned.auto",
    "script": "external.script",
}
"""The module of each strategy. What is in the others is not imported for it."""

S = TypeVar("S", bound="type[Rules[Any]]")

_STRATEGIES: dict[str, type[Rules[Any]]] = {}


def register(name: str) -> Callable[[S], S]:
    """Register the decorated class as the strategy ``name``, which ``MODULES`` and ``BY_STRATEGY`` have too."""

    def add(cls: S) -> S:
        cls.config_class = BY_STRATEGY[name]
        _STRATEGIES[name] = cls
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


def config_class(name: str) -> type[StrategyConfig]:
    """Return the dataclass of the keys of the strategy ``name``. Raises KeyError if there is none."""
    return BY_STRATEGY[name]

"""The strategies of this feature: the keys of each, and where it is. Imports no torch.

The default values are in ``conf/strategy/``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from orchestrator.config.build import option
from orchestrator.config.schema import StrategyConfig


@dataclass(frozen=True, kw_only=True)
class DPConfig(StrategyConfig):
    """The keys of ``dp``."""

    name: Literal["dp"]
    loss_on: Literal["device0", "replicas"] = option(
        "device0: outputs are gathered there and the loss computed; replicas: each computes its own"
    )
    verbose: bool = option("print the sizes inside the replicas and outside into the worker's log")


@dataclass(frozen=True, kw_only=True)
class HogwildConfig(StrategyConfig):
    """The keys of ``hogwild``."""

    name: Literal["hogwild"]


@dataclass(frozen=True, kw_only=True)
class LockedSGDConfig(StrategyConfig):
    """The keys of ``locked_sgd``."""

    name: Literal["locked_sgd"]
    lock: Literal["step", "update"] = option(
        "step: one worker at a time reads, computes and updates; update: one at a time updates"
    )


@dataclass(frozen=True, kw_only=True)
class ParameterServerConfig(StrategyConfig):
    """The keys of ``parameter_server``."""

    name: Literal["parameter_server"]
    num_shards: int = option(
        "parameter servers, in addition to the workers, each with an equal share of the parameters",
        minimum=1,
    )
    consistency: Literal["sync", "async"] = option(
        "when gradients are applied; sync: the gradients of all workers together, as in ddp; async: each as it arrives"
    )


STRATEGIES: Mapping[str, tuple[type[StrategyConfig], str]] = {
    "dp": (DPConfig, "dp"),
    "hogwild": (HogwildConfig, "hogwild"),
    "locked_sgd": (LockedSGDConfig, "hogwild"),
    "parameter_server": (ParameterServerConfig, "parameter_server.strategy"),
}
"""The keys of each strategy, and its module in this folder."""

"""The keys of ``parameter_server``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from orchestrator.config.build import option
from orchestrator.config.schema import StrategyConfig


@dataclass(frozen=True, kw_only=True)
class ParameterServerConfig(StrategyConfig):
    """The keys of ``parameter_server``."""

    name: Literal["parameter_server"]
    num_shards: int = option(
        "parameter servers, in addition to the workers, each with an equal share of the parameters",
        minimum=1,
    )
    consistency: Literal["sync", "async", "stale"] = option(
        "when gradients are applied; sync: the gradients of all workers together, as in ddp; async: each as it "
        "arrives; stale: async within max_staleness"
    )
    max_staleness: int = option(
        "steps by which a worker may be ahead of the slowest, with consistency=stale", minimum=0
    )
    compression: Literal["none", "bf16"] = option("compression of the gradients that are pushed")

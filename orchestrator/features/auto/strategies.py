"""The strategy of this feature: its keys, and where it is. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from orchestrator import features
from orchestrator.config.build import option
from orchestrator.config.schema import StrategyConfig
from orchestrator.features.auto.choice import StrategyName
from orchestrator.strategies.keys import ScheduleName


@dataclass(frozen=True, kw_only=True)
class AutoConfig(StrategyConfig):
    """The keys of ``auto``."""

    name: Literal["auto"]
    candidates: tuple[StrategyName, ...] = option("the strategies to choose from")
    schedules: tuple[ScheduleName, ...] = option("the pipeline schedules to choose from")
    measured: int = option(
        "candidates to measure at least, those with the best predictions; then each one that is predicted to be faster "
        "than the best of them; 0: trust the prediction",
        minimum=0,
    )
    measured_steps: int = option("steps for which each of them is measured", minimum=1)
    profile: Literal["reuse", "fresh"] = option(
        "reuse: take the measurements of an earlier run of this job with these sizes on this hardware, if there are any"
    )

    @property
    def with_servers(self) -> bool:
        """Whether a candidate has parameter servers."""
        return "parameter_server" in self.candidates

    @property
    def is_choice(self) -> bool:
        return True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not features.paths("verbs/plan.py"):
            raise ValueError(
                "strategy=auto: predicts as `orchestrator plan` does, which is not here; choose a strategy"
            )


STRATEGIES = {"auto": (AutoConfig, "rules")}

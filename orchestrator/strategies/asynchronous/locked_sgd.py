"""``locked_sgd``: like ``hogwild``, with a lock. The baseline for lock-free updates.

All workers of a node train one model in shared memory, each on its own share of the data and with its own loss. A lock
excludes the other workers for the whole step (``strategy.lock=step``: read, compute, update), so that no gradient is
stale, or only for the update (``strategy.lock=update``). Hogwild! (Recht, Re, Wright and Niu, NIPS 2011) compares with
such schemes.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import ClassVar, Literal

from orchestrator.config.schema import StrategyConfig, option
from orchestrator.job import Job
from orchestrator.planning.mesh import Mesh
from orchestrator.strategies.asynchronous.hogwild import Hogwild, HogwildConfig, SharedMemoryRules
from orchestrator.strategies.registry import register


@dataclass(frozen=True, kw_only=True)
class LockedSGDConfig(HogwildConfig):
    """The keys of ``locked_sgd``."""

    name: Literal["locked_sgd"]  # type: ignore[assignment]
    lock: Literal["step", "update"] = option(
        "step: one worker at a time reads, computes and updates; update: one at a time updates"
    )


@register("locked_sgd")
class LockedRules(SharedMemoryRules[LockedSGDConfig]):
    """Workers with a lock."""

    config_class: ClassVar[type[StrategyConfig]] = LockedSGDConfig

    @classmethod
    def trainer(cls, options: LockedSGDConfig, mesh: Mesh, job: Job) -> type[LockedSGD]:
        return LockedSGD


class LockedSGD(Hogwild):
    """One worker."""

    @property
    def _locks_update(self) -> bool:
        return not self._locks_step

    def _exclusive(self) -> contextlib.AbstractContextManager[None]:
        return self._lock() if self._locks_step else contextlib.nullcontext()

    @property
    def _locks_step(self) -> bool:
        return LockedSGDConfig.of(self.context.options).lock == "step"

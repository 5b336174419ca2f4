"""The strategy of this feature: its keys, and where it is. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from orchestrator.config.schema import StrategyConfig


@dataclass(frozen=True, kw_only=True)
class ScriptConfig(StrategyConfig):
    """The keys of ``script``."""

    implied: ClassVar[Mapping[str, str]] = {"job": "script", "recovery.max_failures": "0"}
    named_after: ClassVar[str | None] = "job.script"
    unread: ClassVar[tuple[str, ...]] = (
        *("train.", "data.", "checkpoint.", "callbacks", "recovery.peer_copy_every", "recovery.chaos"),
    )
    why_unread: ClassVar[str] = (
        "strategy=script runs the script's own loop, which does not read it; leave it out, and give the script its "
        "options in job.args"
    )

    name: Literal["script"]

    @property
    def elastic(self) -> bool:
        return True


STRATEGIES: Mapping[str, tuple[type[StrategyConfig], str]] = {"script": (ScriptConfig, "script")}
"""The keys of each strategy, and its module in this folder."""

"""``auto`` at the door of strategies that choose another one."""

from __future__ import annotations

from typing import Any

from orchestrator.features.auto.decision import Decision, chosen_before

__all__ = ["choose", "chosen_before"]


def choose(*given: Any, measure: bool, **settings: Any) -> Decision:
    """Choose a strategy. The arguments, and what it raises, are as for :meth:`Choosing.choose`."""
    from orchestrator.features.auto.chooser import Chooser  # imports every strategy, which takes seconds

    return Chooser(*given, **settings).choose(measure=measure)

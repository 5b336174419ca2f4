"""How a run ended, as one description that the console, ``show`` and MLflow lay out. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.display.text import first_line
from orchestrator.protocol.machine_use import describe_sharing
from orchestrator.protocol.metrics import summary_value, waited_s


@dataclass(frozen=True, kw_only=True)
class RunEnd:
    """How a run ended, or how far it has come. None, 0 and an empty text stand for what is not known.

    Attributes:
        status: FINISHED, PRUNED, FAILED or KILLED.
        reason: why it ended, in one line; empty if it has done all its steps.
        took_s: the seconds from the start to the end, without waits.
        results: the last loss and the results of evaluations, by their keys in the summary.
        step_ms: the median time of a step.
        startup_s: the seconds up to the first step.
        bubble_pct: the measured bubble of the pipeline, and the one in theory.
        warning: what makes the times doubtful.
        advice: what limited the speed, and what to change.
        profiled: where the time of a step went.
        recovery_s: how long each recovery took.
        steps_lost: the steps that were repeated.
    """

    status: str
    reason: str
    steps: int | None
    took_s: float | None
    results: Mapping[str, float]
    samples_per_s: float | None
    step_ms: float | None
    startup_s: float | None
    bubble_pct: tuple[float, float] | None
    warning: str
    advice: str
    profiled: str
    restarts: int
    recovery_s: tuple[float, ...]
    steps_lost: int


def run_end(
    summary: Mapping[str, Any],
    *,
    status: str = "",
    reason: str = "",
    started: Any = None,
    ended: Any = None,
    evaluated: Sequence[str] = ("val_",),
) -> RunEnd:
    """Return the description of a run.

    Args:
        summary: the summary of the run, in this process or from a file.
        status: see :class:`RunEnd`.
        reason: why it ended; of several lines, the first counts.
        started: when, in seconds since the epoch; anything but a number if it is not known.
        ended: the same.
        evaluated: what the keys of the results of evaluations begin with.
    """
    keys = [key for key in summary if key == "final_loss" or key.startswith(tuple(evaluated))]
    is_timed = isinstance(started, (int, float)) and isinstance(ended, (int, float)) and ended >= started
    others = describe_sharing(summary)
    warning = (
        f"warning: other programs used {others} while the steps were timed; on a free machine the run may be faster"
    )
    steps, bubble, theory, restarts, lost = (
        summary_value(summary, key) for key in ("steps", "bubble_pct", "bubble_theory_pct", "restarts", "steps_lost")
    )
    return RunEnd(
        status=status,
        reason=first_line(reason),
        steps=None if steps is None else int(steps),
        took_s=ended - started - waited_s(summary) if is_timed else None,
        results={key: value for key in keys if (value := summary_value(summary, key)) is not None},
        samples_per_s=summary_value(summary, "samples_per_s"),
        step_ms=summary_value(summary, "step_ms_p50"),
        startup_s=summary_value(summary, "startup_s"),
        bubble_pct=None if bubble is None or theory is None else (bubble, theory),
        warning="" if others is None else warning,
        advice=str(summary.get("limit") or ""),
        profiled=str(summary.get("profiled") or ""),
        restarts=int(restarts or 0),
        recovery_s=tuple(summary.get("recovery_s") or ()),
        steps_lost=int(lost or 0),
    )

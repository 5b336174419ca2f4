"""The contenders as a table, and as a record."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from orchestrator.tuning.choose import Contender, best, reason

_HEADS = (
    *("strategy", "predicted ms", "compute", "exchange", "idle", "input", "memory MB"),
    *("measured ms", "error", "past error"),
)
DISPENSABLE = ("input", "memory MB", "exchange", "idle", "compute", "error", "past error")
"""The columns that a narrow terminal leaves out, the first ones first."""

_LEGEND = "step times in ms: predicted = compute + exchange of gradients + idle (waiting for other stages) + input"
_LEGEND_OF_PAST = "past error: the median of earlier predictions for any job on this hardware, and their number"


def columns(contenders: Sequence[Contender]) -> list[tuple[str, ...]]:
    """Return the columns of a table of the contenders; each is its heading and its cells.

    The fastest comes first, and those that were measured before all others. Those refused have no row, and columns
    without values are left out.
    """
    valid = sorted(
        (c for c in contenders if not c.refused),
        key=lambda c: (c.measured_ms is None, c.measured_ms or c.predicted_ms),
    )
    found = zip(_HEADS, *map(_row, valid), strict=True)
    return [column for column in found if any(column[1:])]


def markdown(contenders: Sequence[Contender]) -> str:
    """Return a report in Markdown."""
    first, *others = columns(contenders)
    head, *rows = (_line(row) for row in zip(first, *others, strict=True))
    return with_table(contenders, [head, _line(["---", *("---:" for _ in others)]), *rows])


def with_table(contenders: Sequence[Contender], table: Sequence[str]) -> str:
    """Return a report with the lines of a table of the columns: how to read it, what was refused, and the choice."""
    legend = [_LEGEND] if any(c.prediction for c in contenders) else []
    legend += [_LEGEND_OF_PAST] if any(c.past_errors for c in contenders) else []
    refused = [f"- {c.name}: refused: {c.refused}" for c in contenders if c.refused]
    parts = (legend, table, refused, [verdict(contenders)])
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def verdict(contenders: Sequence[Contender]) -> str:
    """Return the choice, as typed on the command line, and its reason."""
    winner = best(contenders)
    assert winner is not None
    return f"auto chooses {' '.join(winner.overrides)}: {reason(contenders)}"


def record(contenders: Sequence[Contender]) -> dict[str, Any]:
    """Return the contenders as values of JSON."""
    return {"contenders": [_as_json(c) for c in contenders]}


def _as_json(contender: Contender) -> dict[str, Any]:
    values = dataclasses.asdict(contender)
    if contender.prediction is not None:
        values["prediction"]["step_ms"] = contender.prediction.step_ms
    return {"name": contender.name, **values}


def _row(contender: Contender) -> tuple[str, ...]:
    prediction, error = contender.prediction, contender.error
    predicted: tuple[str, ...] = ("",) * 6
    if prediction is not None:
        times = (prediction.step_ms, prediction.compute_ms, prediction.exchange_ms, prediction.idle_ms)
        predicted = (
            *(f"{ms:.4g}" for ms in (*times, prediction.input_ms)),
            f"{prediction.memory_bytes / 1e6:.4g}",
        )
    measured = "" if contender.measured_ms is None else f"{contender.measured_ms:.4g}"
    past = contender.past_errors
    past_error = f"{statistics.median(past):+.0%} ({len(past)})" if past else ""
    return (contender.name, *predicted, measured, "" if error is None else f"{error:+.0%}", past_error)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"

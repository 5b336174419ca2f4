"""The contenders as a table, and as a record."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from orchestrator.tuning.choose import Contender, best, reason

_HEADS = ("strategy", "predicted ms", "compute", "exchange", "idle", "input", "memory MB", "measured ms", "error")


def table(contenders: Sequence[Contender]) -> str:
    """Return a table in Markdown of all contenders, the fastest first, and those refused with their reasons."""
    valid = sorted(
        (c for c in contenders if not c.refused), key=lambda c: (c.measured_ms or c.predicted_ms, c.predicted_ms)
    )
    rows = [_HEADS, *map(_row, valid)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADS))]
    lines = [_line(row, widths) for row in rows]
    rule = (
        "| " + " | ".join("-" * width if i == 0 else "-" * (width - 1) + ":" for i, width in enumerate(widths)) + " |"
    )
    refused = [f"- {c.name}: refused: {c.refused}" for c in contenders if c.refused]
    return "\n".join([lines[0], rule, *lines[1:], *(["", *refused] if refused else [])])


def verdict(contenders: Sequence[Contender]) -> str:
    """Return the choice and its reason in one line."""
    winner = best(contenders)
    assert winner is not None
    return f"auto chooses {winner.name}: {reason(contenders)}"


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
    return (contender.name, *predicted, measured, "" if error is None else f"{error:+.0%}")


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = [
        cell.ljust(width) if i == 0 else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
    return "| " + " | ".join(cells) + " |"

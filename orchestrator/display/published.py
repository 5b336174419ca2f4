"""The errors of predictions of published runs, as a table and as JSON."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from orchestrator.display.text import TableColumn, text_lines
from orchestrator.prediction.published import LARGE, Compared, Spread

_HEADS = ("runs", "predicted", "median", "mean", "90 %", "worst")


def table(compared: Sequence[Compared]) -> str:
    """Return the errors by stack of software and by size, as lines of text."""
    stacks = sorted({c.run.stack for c in compared})
    groups: dict[str, Callable[[Compared], bool]] = {
        **{name: functools.partial(_is_of, name) for name in stacks},
        "dense": lambda c: not c.run.is_sparse,
        f"dense, {LARGE} devices and more": lambda c: not c.run.is_sparse and c.run.devices >= LARGE,
        "with experts": lambda c: c.run.is_sparse,
        f"all, {LARGE} devices and more": lambda c: c.run.devices >= LARGE,
    }
    rows = []
    for name, belongs in groups.items():
        own = [c for c in compared if belongs(c)]
        if any(not c.tuned for c in own):
            spread = Spread.of(own)
            shares = (spread.median, spread.mean, spread.ninth, spread.worst)
            rows.append((name, f"{spread.count}", *(f"{share:.1%}" for share in shares)))
    columns = [
        TableColumn(heading=heading, cells=cells, justify="left" if heading == "runs" else "right")
        for heading, cells in zip(_HEADS, zip(*rows, strict=True), strict=True)
    ]
    tuned = sum(c.tuned for c in compared)
    note = f"absolute errors of tokens per second and device; {tuned} runs that shares were taken from are left out"
    return "\n".join([*text_lines(columns, unicode=True), "", note])


def as_json(compared: Sequence[Compared]) -> list[dict[str, Any]]:
    """Return a row for each run."""
    return [
        {
            **{key: c.run.row[key] for key in ("source", "framework", "model", "gpu", "gpus", "seq", "precision")},
            "stack": c.run.stack,
            "measured": c.run.measured,
            "predicted": c.predicted,
            "error": c.error,
            "tuned": c.tuned,
        }
        for c in compared
    ]


def _is_of(stack: str, compared: Compared) -> bool:
    return compared.run.stack == stack

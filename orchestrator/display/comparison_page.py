"""A comparison as one HTML file that needs no network: a table, charts to point at, and pictures of its runs."""

from __future__ import annotations

import base64
import html
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrator.display.comparison import Curve
from orchestrator.display.comparison_analysis import RATE, Comparison, verdict
from orchestrator.display.comparison_plot import drawn
from orchestrator.display.comparison_table import columns, remarks
from orchestrator.display.plot_style import COLOURS, smoothed
from orchestrator.display.run_pictures import STEP_TIME
from orchestrator.display.text import rate
from orchestrator.records.json_file import write_atomically
from orchestrator.records.run_dir import RunDir

_TEMPLATE = Path(__file__).with_name("comparison_page.html")
_POINTS_IN_ALL = 20_000
_MOST_POINTS = 400
_MOST_PICTURES = 6
_PICTURES: Mapping[str, Callable[[RunDir], Path]] = {
    "Step times": lambda run_dir: run_dir.plots / STEP_TIME,
    "Timelines": lambda run_dir: run_dir.timeline_picture,
}
"""By heading, where a run has its picture."""


def write_page(comparison: Comparison, path: Path, *, title: str) -> None:
    """Write the page to ``path``.

    Raises:
        OSError: ``path`` cannot be written.
    """
    write_atomically(path, page(comparison, title=title).encode())


def page(comparison: Comparison, *, title: str) -> str:
    """Return the page."""
    comparison = comparison.grouped
    data = {
        "verdict": verdict(comparison),
        "remarks": remarks(comparison),
        "colours": COLOURS,
        "columns": [
            {"heading": column.heading, "numeric": column.justify == "right", "cells": column.cells}
            for column in columns(comparison, unicode=True)
            if column.name != "bar"
        ],
        "runs": _runs(comparison),
        "pictures": [
            {"heading": heading, "pictures": found}
            for heading, picture_of in _PICTURES.items()
            if (found := _pictures(comparison, picture_of))
        ],
    }
    texts = {
        "TITLE": html.escape(title),
        "DATA": json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),  # as in "</script" and "<!--"
    }
    return re.sub("|".join(texts), lambda found: texts[found[0]], _TEMPLATE.read_text())


def _runs(comparison: Comparison) -> list[dict[str, Any]]:
    shown = {run.location for run in drawn(comparison)}
    most = min(_MOST_POINTS, max(20, _POINTS_IN_ALL // len(comparison.runs)))
    return [
        {
            "name": comparison.name(run),
            "shown": run.location in shown,
            "rate": run.value(RATE),
            "spread": run.spread.get(RATE, 0.0),
            "rateText": rate(speed) if (speed := run.value(RATE)) else "not measured",
            "curve": _thinned(comparison.curves[run.location], most),
        }
        for run in comparison.runs
    ]


def _thinned(curve: Curve, most: int) -> dict[str, list[float | None]]:
    """The smoothed curve at ``most`` of its points at most; None for what is not finite."""
    step = max(1, -(-len(curve.losses) // most))
    kept = sorted({*range(0, len(curve.losses), step), *([len(curve.losses) - 1] if curve.losses else [])})

    def at(values: Sequence[float]) -> list[float | None]:
        return [float(f"{values[i]:.6g}") if abs(values[i]) < float("inf") else None for i in kept]

    return {"losses": at(smoothed(curve.losses)), "samples": at(curve.samples), "seconds": at(curve.seconds)}


def _pictures(comparison: Comparison, picture_of: Callable[[RunDir], Path]) -> list[dict[str, str]]:
    """The pictures of the first runs that have one, as data URLs."""
    found: list[dict[str, str]] = []
    for run in comparison.runs:
        picture = picture_of(RunDir(Path(run.location)))
        if len(found) < _MOST_PICTURES and picture.is_file():
            encoded = base64.b64encode(picture.read_bytes()).decode()
            found.append({"name": comparison.name(run), "source": f"data:image/png;base64,{encoded}"})
    return found

"""What the plots have in common: colours, fonts and lines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# Okabe and Ito's colours, which colour-blind people can distinguish; yellow is too pale for lines.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")

STYLE: Any = {
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "legend.edgecolor": "none",
    "legend.handlelength": 3.2,
}
"""Settings of matplotlib."""

_DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)), (0, (3, 1.5)), (0, (8, 3)))
_SMOOTH_FROM_POINTS = 80


def line_style(index: int) -> dict[str, Any]:
    """Return the colour and the dashes of the line ``index``; lines of equal colours have other dashes."""
    return {
        "color": COLOURS[index % len(COLOURS)],
        "linestyle": _DASHES[(index + index // len(COLOURS)) % len(_DASHES)],
    }


def smoothed(values: Sequence[float]) -> list[float]:
    """Return a running mean over a fortieth of the points; few points stay as they are."""
    if len(values) <= _SMOOTH_FROM_POINTS:
        return list(values)
    half = len(values) // 80
    windows = (values[max(0, i - half) : i + half + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def plain_in_plot(text: str) -> str:
    """Return ``text`` for matplotlib, which takes ``$`` for a formula and leaves ``_label`` out of legends."""
    text = text.replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def thousands(value: float, _: float) -> str:
    """Format a tick: ``500``, ``1.5k``, ``2M``."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"

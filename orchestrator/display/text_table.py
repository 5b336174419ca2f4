"""Tables of plain text with aligned columns. Rich takes seconds for hundreds of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from rich.cells import cell_len

_GAP = "  "


@dataclass(frozen=True, kw_only=True)
class TableColumn:
    """A column with the cell of each row.

    Attributes:
        name: identifies a column without a heading.
        priority: see :class:`~orchestrator.protocol.metrics.Column`.
    """

    heading: str
    cells: Sequence[str]
    name: str = ""
    justify: Literal["left", "right"] = "right"
    priority: int | None = None

    @cached_property
    def width(self) -> int:
        """The characters that the column needs on a terminal."""
        return max(cell_len(text) for text in (self.heading, *self.cells))

    def aligned(self, text: str) -> str:
        """Return the cell or heading ``text``, padded to the width of the column."""
        padding = " " * (self.width - cell_len(text))
        return text + padding if self.justify == "left" else padding + text


def total_width(columns: Sequence[TableColumn]) -> int:
    """Return the characters that a table with these columns needs on a terminal."""
    return sum(column.width for column in columns) + len(_GAP) * (len(columns) - 1)


def text_lines(columns: Sequence[TableColumn], *, unicode: bool) -> list[str]:
    """Return the heading, a rule and the rows, without trailing blanks."""
    aligned = [[column.aligned(text) for text in (column.heading, *column.cells)] for column in columns]
    head, *rows = (_GAP.join(cells).rstrip() for cells in zip(*aligned, strict=True))
    return [head, ("─" if unicode else "-") * total_width(columns), *rows]


def without_least(columns: Sequence[TableColumn], width: int) -> list[TableColumn]:
    """Return the columns that fit into ``width`` characters; the ones of the lowest priority are left out first."""
    kept = list(columns)
    for column in sorted((c for c in columns if c.priority is not None), key=lambda c: c.priority or 0):
        if total_width(kept) <= width:
            break
        kept.remove(column)
    return kept


def cut(text: str, width: int, *, unicode: bool) -> str:
    """Return ``text`` with at most ``width`` characters."""
    return text if cell_len(text) <= width else text[: max(1, width - 1)] + ("…" if unicode else "~")

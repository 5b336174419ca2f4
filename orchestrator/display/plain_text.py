"""Building blocks of plain text for users: numbers, durations, bars, tables. Without escape codes."""

from __future__ import annotations

import io
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from rich import box
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.table import Table

MOST_ROWS = 8
"""Longer lists of ranks or nodes are summarised."""

_BLOCKS = "▁▂▃▄▅▆▇█"
_ASCII_BLOCKS = "_.-:=+*#"
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_ESCAPE = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?|[@-Z\\^_]?)")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def takes_unicode(stream: Any) -> bool:
    """Return whether ``stream`` can encode box lines, blocks and arrows."""
    try:
        (_BLOCKS + _EIGHTHS + "─│╭◀·").encode(getattr(stream, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def writable(text: str, stream: Any) -> str:
    """Return ``text`` with ``?`` for characters that ``stream`` cannot encode."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "replace").decode(encoding)


def say_note(text: str) -> None:
    """Print what the user should know, on standard error."""
    print(writable(clean(f"note: {text}"), sys.stderr), file=sys.stderr)


def refuse(verb: str, reason: object, *, code: int = 2) -> int:
    """Print why ``orchestrator <verb>`` cannot do what it was asked; returns ``code``, its exit code."""
    print(writable(clean(f"{verb}: {reason}"), sys.stderr), file=sys.stderr)
    return code


def clean(text: str) -> str:
    """Return text of other programs without escape codes and control characters; a carriage return ends a line."""
    text = _ESCAPE.sub("", text).replace("\r\n", "\n").replace("\r", "\n")
    return _CONTROL.sub("", text)


def first_line(text: str) -> str:
    """Return the first line of ``text`` that is not blank, cleaned; empty if there is none."""
    return next((line for line in clean(text).splitlines() if line.strip()), "").strip()


def indented(text: str, by: str = "  ") -> str:
    """Return ``text`` with each line indented, except empty ones."""
    return "\n".join(by + line if line else line for line in text.splitlines())


def number(value: float) -> str:
    """Return a loss or an accuracy with four significant digits."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    return f"{value:.4f}" if 0.01 <= abs(value) < 10 else f"{value:.4g}"


def rate(value: float) -> str:
    """Return a rate such as samples per second: ``8,310``, ``4.2``."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def format_value(value: float, template: str) -> str:
    """Return ``value`` as the ``format`` of a :class:`~orchestrator.protocol.metrics.MetricSpec` says."""
    match template:
        case "number":
            return number(value)
        case "rate":
            return rate(value)
        case _:
            return fill(template, value)


def fill(template: str, value: float | str) -> str:
    """Return ``template`` with ``value`` in place of its braces; the plain value if the template is invalid.

    A run directory may contain any template.
    """
    try:
        return template.format(value)
    except (ValueError, LookupError, AttributeError, TypeError):
        return str(value)


def duration(seconds: float, *, whole: bool = False) -> str:
    """Return ``4.2s``, ``31s``, ``3m05s`` or ``2h05m``; ``whole`` leaves out tenths of a second."""
    if seconds < 9.95 and not whole:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes == 0:
        return f"{rest}s"
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    return f"{minutes // 60}h{minutes % 60:02d}m"


def size(size_bytes: float) -> str:
    """Return ``812 B``, ``2.1 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if size_bytes < 999.5:  # .3g would round more to 1e+03
            return f"{size_bytes:.3g} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.3g} TB"


def count(number: int, noun: str, plural: str = "s") -> str:
    """Return ``1 worker``, ``2 workers``."""
    return f"{number:,} {noun}{'' if number == 1 else plural}"


def workers_text(world_size: int, num_servers: int) -> str:
    """Return ``2 workers``, ``2 workers and 1 server``."""
    workers = count(world_size - num_servers, "worker")
    return f"{workers} and {count(num_servers, 'server')}" if num_servers else workers


def sparkline(values: Sequence[float], *, unicode: bool, from_zero: bool = False) -> str:
    """Return one character per value, scaled to the range of the values or, ``from_zero``, to their maximum."""
    blocks = _BLOCKS if unicode else _ASCII_BLOCKS
    finite = [v for v in values if math.isfinite(v)]
    if not finite:
        return "?" * len(values)
    low, high = 0.0 if from_zero else min(finite), max(finite)
    top = len(blocks) - 1

    def block(value: float) -> str:
        share = (value - low) / (high - low) if high > low else 0.5
        return blocks[round(max(share, 0.0) * top)]

    return "".join(block(v) if math.isfinite(v) else "?" for v in values)


def bar(share: float, *, width: int, unicode: bool) -> str:
    """Return a horizontal bar over ``share`` (0 to 1) of ``width`` characters, padded to ``width``."""
    share = min(max(share, 0.0), 1.0)
    if not unicode:
        return ("#" * round(share * width)).ljust(width)
    eighths = round(share * width * 8)
    text = "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")
    return text.ljust(width)


def render(renderable: RenderableType, *, width: int) -> str:
    """Return the layout of Rich as plain text, without trailing blanks."""
    console = Console(
        file=io.StringIO(),
        width=width,
        color_system=None,
        force_terminal=False,
        force_jupyter=False,
        highlight=False,
        markup=False,
        emoji=False,
    )
    with console.capture() as capture:
        console.print(renderable)
    return "\n".join(line.rstrip() for line in capture.get().rstrip().splitlines())


def plain_table(*, unicode: bool, **options: Any) -> Table:
    """Return a table whose only line is a rule below its head."""
    style = box.SIMPLE_HEAD if unicode else box.ASCII
    return Table(box=style, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="", **options)


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

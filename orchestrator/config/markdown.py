"""Texts of users and programs within Markdown, where they may look like Markdown or HTML."""

from __future__ import annotations

import re


def plain(text: str) -> str:
    """Return Markdown that shows ``text`` as it is, also in a cell of a table."""
    return re.sub(r"[\\`*\[\]<|&]", r"\\\g<0>", text)


def code(text: str) -> str:
    """Return Markdown that shows the line ``text`` as code."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence, space = "`" * (longest + 1), " " if longest else ""
    return f"{fence}{space}{text}{space}{fence}"

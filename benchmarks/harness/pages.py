"""Parts of a page of the documentation that a script writes, between two comments."""

from __future__ import annotations

import re

END = "<!-- end -->"


def begin(writer: str, part: str) -> str:
    """Return the comment before the part that ``benchmarks/<writer>.py`` writes."""
    return f"<!-- benchmarks/{writer}.py writes {part} -->"


def parts(page: str, writer: str) -> dict[str, str]:
    """Return the text of each part of ``page`` that ``benchmarks/<writer>.py`` writes, by its name."""
    pattern = begin(re.escape(writer), r"([^\n]+?)") + f"\n\n(.*?)\n\n{END}"
    return dict(re.findall(pattern, page, re.DOTALL))


def with_part(page: str, writer: str, part: str, text: str) -> str:
    """Return ``page`` with the text of one part replaced.

    Raises:
        ValueError: ``page`` has no such part.
    """
    before, found, rest = page.partition(begin(writer, part) + "\n")
    _, ended, after = rest.partition(END)
    if not found or not ended:
        raise ValueError(f"no part {begin(writer, part)} in the page")
    return f"{before}{found}\n{text}\n\n{END}{after}"

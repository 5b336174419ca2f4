"""Names of modules and tensors in messages."""

from __future__ import annotations

from collections.abc import Sequence

MOST_NAMES = 2


def first_of(names: Sequence[str]) -> str:
    """Return the first names and the number of the others, as in ``a, b and 3 more``."""
    rest = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {rest} more" if rest > 0 else "")

"""Types of the options of verbs, for ``argparse``."""

from __future__ import annotations

import argparse
import math


def positive(text: str) -> int:
    """Return the whole number ``text``, which is at least 1.

    Raises:
        argparse.ArgumentTypeError: it is not.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected a whole number of at least 1")
    return int(text)


def finite(text: str) -> float:
    """Return the number ``text``, which is finite.

    Raises:
        argparse.ArgumentTypeError: it is not.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text}: expected a number")
    return value

"""How far the predictions of each candidate were off in earlier choices on this hardware."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from orchestrator.records.json_file import read_json, write_json
from orchestrator.tuning.choose import Contender

_KEPT = 20
"""The errors of a candidate that are kept, the newest."""


def read_errors(file: Path) -> Mapping[str, list[float]]:
    """Return the relative errors by the name of the candidate, the oldest first; none from a damaged file."""
    try:
        return read_json(file)
    except ValueError:
        return {}


def add_errors(file: Path, contenders: Iterable[Contender]) -> None:
    """Add the errors of the contenders that were predicted and measured."""
    before = read_errors(file)
    new = {c.name: [*before.get(c.name, []), c.error][-_KEPT:] for c in contenders if c.error is not None}
    if new:
        write_json(file, {**before, **new})

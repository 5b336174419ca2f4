"""A stream of the lines of a file."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from typing import Any

from torch.utils.data import IterableDataset

__all__ = ["IterableDataset", "itertools"]

# the example


def check() -> None:
    kind: Any = globals()["Lines"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "lines")
        path.write_text("a\nb\nc\n")
        stream, resumed = kind(path), kind(path)
        lines = iter(stream)
        assert [next(lines), next(lines)] == ["a\n", "b\n"]
        resumed.load_state_dict(stream.state_dict())
        assert list(resumed) == ["c\n"]
        assert list(resumed) == ["a\n", "b\n", "c\n"]

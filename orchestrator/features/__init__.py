"""What hangs on the core by few threads, each in a folder of its own. The core imports none of it by name."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType


def paths(name: str) -> list[Path]:
    """Return what the features have by this name, such as ``conf`` or ``keys.py``: one path for each that has it."""
    return sorted(Path(__path__[0]).glob(f"*/{name}"))


def modules(name: str) -> Iterator[ModuleType]:
    """Import the module of this name of each feature that has one."""
    for path in paths(f"{name}.py"):
        yield importlib.import_module(f"{__name__}.{path.parent.name}.{name}")

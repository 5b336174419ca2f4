"""JSON files that other processes read while they are replaced."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty if the file does not exist.

    Raises:
        ValueError: the file is damaged; the message has its path.
    """
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except ValueError as e:
        raise ValueError(f"{path} is damaged: {e}") from e
    if not isinstance(data, dict):
        raise ValueError(f"{path} is damaged: expected an object")
    return data


def write_json(path: Path, data: Mapping[str, Any], *, durable: bool = False) -> None:
    """Write a JSON file as :func:`write_atomically` does."""
    write_atomically(path, (json.dumps(data, indent=2, default=str) + "\n").encode(), durable=durable)


def write_atomically(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Write a file and rename it into place, so that readers never see half of it.

    Args:
        durable: return only when the file is on the disk, where it survives a crash of the machine.

    Raises:
        OSError: the file cannot be written; the old one is unchanged.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

"""JSON files that other processes read while they are replaced."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

_SHOWN = 40
"""The characters of a wrong value that an error has."""


Types = Mapping[str, type | tuple[type, ...]]
"""What the values of keys are, unless they are null or missing. A key with a dot is in an object that is listed too."""


def read_json(path: Path, types: Types = MappingProxyType({})) -> dict[str, Any]:
    """Return the object in a JSON file, whose values are of these ``types``; empty if the file does not exist.

    Raises:
        ValueError: the file is damaged; the message has its path.
        OSError: it cannot be read.
    """
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{path} is damaged: {e}") from e
    except OSError as e:  # which names no file if the read has failed
        raise OSError(e.errno, e.strerror, str(path)) from e
    if not isinstance(data, dict):
        raise ValueError(f"{path} is damaged: expected an object")
    for key, wanted in types.items():
        section, _, name = key.rpartition(".")
        value = (data.get(section) or {} if section else data).get(name)
        if value is not None and not isinstance(value, wanted):
            raise ValueError(f"{path} is damaged: {key} is {json.dumps(value)[:_SHOWN]}")
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

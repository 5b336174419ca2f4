"""Where a key stands in the files of the user, for errors about it: the file and the line."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from pathlib import Path

import yaml

_KEY_OF_ERROR = re.compile(r"([\w.-]+)(?:\[\d+\][\w.]*)?[:=]")
_PACKAGE = re.compile(r"#\s*@package\s+(\S+)")
_PARAMS = "hydra.sweeper.params."
"""A file has the values of a sweep here, which become overrides."""


def with_places(errors: Sequence[str], files: Iterable[Path], directory: Path, given: Container[str] = ()) -> list[str]:
    """Return ``errors``, each with the files and lines that have its key.

    Args:
        errors: lines that begin with a key, or with something else.
        files: the chosen files of the user.
        directory: where they are.
        given: keys whose values the command line has.
    """
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path in files:
        for key, line in _lines(path, directory):
            if key.startswith(_PARAMS):
                places[key.removeprefix(_PARAMS)].append(_place(path, line))
            elif key not in given:
                places[key].append(_place(path, line))
    return [_with_place(error, places) for error in errors]


def places_of_choice(directory: Path, group: str, name: str) -> str:
    """Return where files in ``directory`` choose ``name`` of a group in their defaults; empty if none does."""
    choice = re.compile(rf"(^|[\s\[{{,/-]){re.escape(group)}(@[\w.]+)?\s*:\s*{re.escape(name)}(?![\w.-])")
    found = [
        _place(path, number)
        for path in sorted(directory.rglob("*.yaml"))
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1)
        if choice.search(line.partition(" #")[0])
    ]
    return " and ".join(found)


def _with_place(error: str, places: defaultdict[str, list[str]]) -> str:
    key = _KEY_OF_ERROR.match(error)
    found = places.get(key[1]) if key is not None else None
    return error if found is None else f"{error} ({' and '.join(found)})"


def _place(path: Path, line: int) -> str:
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{shown}, line {line}"


def _lines(path: Path, directory: Path) -> Iterator[tuple[str, int]]:
    """Yield each key that a file sets, as on the command line, with its line."""
    text = path.read_text(encoding="utf-8")
    header = _PACKAGE.search(text.partition("\n")[0])
    group = ".".join(path.parent.relative_to(directory).parts)
    package = group if header is None else header[1].replace("_group_", group).replace("_global_", "").strip(".")
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    yield from _keys(root, f"{package}." if package else "")


def _keys(node: yaml.Node | None, prefix: str) -> Iterator[tuple[str, int]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield f"{prefix}{key.value}", key.start_mark.line + 1
            yield from _keys(value, f"{prefix}{key.value}.")

"""The fields of a job's class, read from its source: importing a job imports torch, which takes seconds."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Mapping
from importlib.machinery import PathFinder
from pathlib import Path

from orchestrator.config.schema import JobSpec
from orchestrator.config.text import did_you_mean

Fields = Mapping[str, ast.AnnAssign]
"""The statement that declares each field, by its name."""


def fields_in_source(target: str) -> Fields | None:
    """Return the fields of the class with the import path ``target``; None if one file does not tell all of them.

    Nothing is imported. Bases are followed inside of the file.
    """
    module, _, name = target.rpartition(".")
    try:
        tree = ast.parse(Path(_origin(module)).read_bytes())
    except (OSError, ValueError, SyntaxError):
        return None
    classes = {s.name: s for s in tree.body if isinstance(s, ast.ClassDef)}
    imports = [
        s for s in tree.body if isinstance(s, ast.ImportFrom) and s.module in ("orchestrator", "orchestrator.job")
    ]
    without_fields = {alias.asname or alias.name for s in imports for alias in s.names if alias.name == "Job"}

    def of(name: str, inside: frozenset[str]) -> Fields | None:
        if name in without_fields:
            return {}
        cls = classes.get(name)
        if cls is None or name in inside or not all(map(_makes_dataclass, cls.decorator_list or [ast.Name("")])):
            return None
        found: dict[str, ast.AnnAssign] = {}
        for base in cls.bases:
            inherited = of(base.id, inside | {name}) if isinstance(base, ast.Name) else None
            if inherited is None:
                return None
            found |= inherited
        own = [s for s in cls.body if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)]
        return found | {ast.unparse(s.target): s for s in own if "ClassVar" not in ast.unparse(s.annotation)}

    return of(name, frozenset())


def unknown_fields(spec: JobSpec) -> list[str]:
    """Return an error for each given field that the class of the job certainly lacks."""
    fields = fields_in_source(spec.target)
    if fields is None:
        return []
    unknown = [name for name in spec.fields if name not in fields]
    return [f"job.{name}: unknown key; {did_you_mean(name, fields, prefix='job.')}" for name in sorted(unknown)]


def _makes_dataclass(decorator: ast.expr) -> bool:
    return ast.unparse(decorator).partition("(")[0] in ("dataclass", "dataclasses.dataclass")


def _origin(module: str) -> str:
    """Return the file of a module, as an import in the working directory finds it, without importing its packages.

    Raises:
        ValueError: there is no such file.
    """
    first, *rest = module.split(".")
    spec = PathFinder.find_spec(first, [str(Path.cwd())]) or importlib.util.find_spec(first)
    for part in rest:
        spec = spec and PathFinder.find_spec(f"{spec.name}.{part}", spec.submodule_search_locations or ())
    if spec is None or spec.origin is None:
        raise ValueError(f"no file of {module}")
    return spec.origin

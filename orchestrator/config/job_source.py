"""What the source of a job's class tells without an import, which imports torch and takes seconds."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
from collections.abc import Mapping
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from orchestrator.config.build import build
from orchestrator.config.schema import JobSpec
from orchestrator.config.text import did_you_mean

Fields = Mapping[str, ast.AnnAssign]
"""The statement that declares each field, by its name."""
_SIMPLE: Mapping[str, type] = {kind.__name__: kind for kind in (int, float, bool, str)}


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


def classes_beside(name: str) -> list[str]:
    """Return the classes in a file of the working directory, as ``job=`` takes them, given its name or its path."""
    file = Path(name if name.endswith(".py") else f"{name}.py")
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, ValueError, SyntaxError):
        return []
    return [
        f"{'.'.join(file.with_suffix('').parts)}.{s.name}" for s in tree.body if isinstance(s, ast.ClassDef) and s.bases
    ]


def source_errors(spec: JobSpec) -> list[str]:
    """Return what is certainly wrong: there is no such package, or fields are unknown or of another type.

    Only simple types are compared, and no limits.
    """
    package = spec.target.partition(".")[0]
    if "." in spec.target and package.isidentifier() and package != "__main__" and _find(package) is None:
        return [missing_module(f"job._target_={spec.target}", package)]
    fields = fields_in_source(spec.target)
    if fields is None:
        return []
    unknown = [name for name in spec.fields if name not in fields]
    errors = [f"job.{name}: unknown key; {did_you_mean(name, fields, prefix='job.')}" for name in sorted(unknown)]
    types = {n: kind for n in spec.fields if n in fields and (kind := _simple_type(fields[n])) is not None}
    build(dataclasses.make_dataclass("Fields", types.items()), {n: spec.fields[n] for n in types}, "job", errors)
    return errors


def missing_module(key: str, name: str) -> str:
    """Return the error for a module that cannot be found; ``key``: what names it, with its value."""
    return f"{key}: no module {name}; install it or run from the directory that contains it"


def _simple_type(field: ast.AnnAssign) -> Any | None:
    """Return the type of a field; None if it is not simple, or if a call declares more about it."""

    def of(node: ast.expr) -> Any:
        match node:
            case ast.BinOp(left, ast.BitOr(), right):
                return of(left) | of(right)
            case ast.Name(name):
                return _SIMPLE[name]
            case ast.Constant(None):
                return None
        raise KeyError

    if isinstance(field.value, ast.Call):
        return None
    try:
        kind = of(field.annotation)
        return kind | None if isinstance(field.value, ast.Constant) and field.value.value is None else kind
    except (KeyError, TypeError):
        return None


def _makes_dataclass(decorator: ast.expr) -> bool:
    return ast.unparse(decorator).partition("(")[0] in ("dataclass", "dataclasses.dataclass")


def _origin(module: str) -> str:
    """Return the file of a module, as an import in the working directory finds it, without importing its packages.

    Raises:
        ValueError: there is no such file.
    """
    first, *rest = module.split(".")
    spec = _find(first)
    for part in rest:
        spec = spec and PathFinder.find_spec(f"{spec.name}.{part}", spec.submodule_search_locations or ())
    if spec is None or spec.origin is None:
        raise ValueError(f"no file of {module}")
    return spec.origin


def _find(package: str) -> ModuleSpec | None:
    return PathFinder.find_spec(package, [str(Path.cwd())]) or importlib.util.find_spec(package)

"""The reference pages, made from the code: keys, Python, metrics, events. ``python docs/references.py`` writes them."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FunctionType
from typing import Any, get_type_hints

import orchestrator
from orchestrator import features
from orchestrator.config.build import describe
from orchestrator.config.compose import compose
from orchestrator.config.files import choices, group_values, summary
from orchestrator.config.job_loader import find_class
from orchestrator.config.recorded_config import to_dict
from orchestrator.config.schema import Config
from orchestrator.config.text import to_cli
from orchestrator.driver.process.run_context import RunResult
from orchestrator.job import Job
from orchestrator.protocol import events, metric_meanings
from orchestrator.strategies import registry

MEANINGS = {
    section: meanings
    for module in (metric_meanings, *features.modules("metric_meanings"))
    for section, meanings in module.MEANINGS.items()
}
_SECTION = re.compile(r"^(Args|Returns|Yields|Raises|Attributes):$", re.M)
_ENTRY = re.compile(r"^    (\S.*?): ", re.M)


def keys() -> str:
    """Return every key: of the sections, of each strategy, and the fields of each job that ships."""
    config, _ = compose([], [], registry.config_class)
    assert config is not None
    values = to_dict(config)
    parts = ["## Top level", _keys_of(Config, values, "")]
    sections = {n: kind for n, kind in get_type_hints(Config).items() if n not in ("strategy", "job")}
    for name, kind in sections.items():
        if dataclasses.is_dataclass(kind):
            parts += [f"## {name}", _first(kind), _keys_of(kind, values[name], f"{name}.")]
    for name in choices("strategy"):
        cls = registry.config_class(name)
        parts += [f"## strategy={name}", summary("strategy", name)]
        parts += [_keys_of(cls, group_values("strategy", name), "strategy.")]
    for name in choices("job"):
        cls = find_class(group_values("job", name)["_target_"], [])
        assert cls is not None
        parts += [f"## job={name}", _first(cls), _fields_of(cls)]
    return "\n\n".join(parts)


def _keys_of(cls: type[Any], values: Mapping[str, Any], prefix: str) -> str:
    hints = get_type_hints(cls)
    fields = [f for f in dataclasses.fields(cls) if "meaning" in f.metadata]
    return _table(
        ("key", "type", "default", "meaning"),
        (
            (f"`{prefix}{f.name}`", *_value(hints[f.name], f.metadata, values[f.name]), _literal(f.metadata["meaning"]))
            for f in fields
        ),
    )


def _fields_of(cls: type[Job]) -> str:
    hints, meanings = get_type_hints(cls), _attributes(cls)
    fields = [f for f in dataclasses.fields(cls) if f.init]
    return _table(
        ("key", "type", "default", "meaning"),
        ((f"`job.{f.name}`", *_value(hints[f.name], {}, f.default), meanings.get(f.name, "")) for f in fields),
    )


def _value(kind: Any, limits: Mapping[str, Any], default: Any) -> tuple[str, str]:
    return describe(kind, limits), "" if default is dataclasses.MISSING else f"`{to_cli(default)}`"


def python() -> str:
    """Return everything that ``import orchestrator`` offers, and what :func:`orchestrator.run` returns."""
    names = sorted(set(orchestrator.__all__) - {"__version__"}, key=lambda name: (name != "run", name != "Job", name))
    objects = {f"orchestrator.{name}": getattr(orchestrator, name) for name in names} | {"RunResult": RunResult}
    return "\n\n".join(part for name, value in objects.items() for part in _object(name, value))


def _object(name: str, value: Any) -> Iterator[str]:
    yield f"## {name}"
    if not isinstance(value, type):
        yield _signature(name, value)
    yield markdown(inspect.getdoc(value) or "")
    if isinstance(value, type):
        for attribute, text in _texts_below(value):
            yield f"### {value.__name__}.{attribute}"
            yield markdown(text)
        for method, member in vars(value).items():
            if (
                not method.startswith("_")
                and member.__doc__
                and isinstance(member, (FunctionType, classmethod, property))
            ):
                yield f"### {value.__name__}.{method}"
                yield "" if isinstance(member, property) else _signature(method, getattr(value, method))
                yield markdown(inspect.getdoc(member) or "")


def _signature(name: str, function: Any) -> str:
    text = re.sub(r"(: |-> )'([^']*)'", r"\1\2", str(inspect.signature(function)))
    return f"```python\n{name.rpartition('.')[2]}{text}\n```"


def _texts_below(cls: type[Any]) -> Iterator[tuple[str, str]]:
    """Yield the variables of a class that have a string below them, and these strings."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    for statement, following in itertools.pairwise(body.body):
        match statement, following:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                yield name, inspect.cleandoc(text)


def metrics() -> str:
    """Return every metric with its meaning."""
    return "\n\n".join(
        f"## {section}\n\n" + _table(("metric", "meaning"), ((f"`{name}`", text) for name, text in meanings.items()))
        for section, meanings in MEANINGS.items()
    )


def all_events() -> dict[str, type[events.Event]]:
    """Return the classes of events by the names that ``events.jsonl`` has."""
    classes = [c for c in vars(events).values() if isinstance(c, type) and issubclass(c, events.Event)]
    named = {re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower(): cls for cls in classes}
    return {name: cls for name, cls in named.items() if name not in ("event", "worker_failure")}


def event_reference() -> str:
    """Return every event with its fields."""
    parts = []
    for name, cls in all_events().items():
        hints, meanings = cls.__annotations__, {k: v for c in cls.__mro__[::-1] for k, v in _attributes(c).items()}
        fields = [f for f in dataclasses.fields(cls) if f.name != "time"]
        rows = ((f"`{f.name}`", f"`{hints.get(f.name, f.type)}`", meanings.get(f.name, "")) for f in fields)
        parts += [f"## {name}", markdown(_SECTION.split(inspect.getdoc(cls) or "")[0].strip())]
        parts += [_table(("field", "type", "meaning"), rows)] if fields else []
    return "\n\n".join(parts)


def _attributes(cls: type[Any]) -> dict[str, str]:
    """Return what the section ``Attributes`` of a docstring says, by name."""
    parts = _SECTION.split(inspect.getdoc(cls) or "")
    text = dict(zip(parts[1::2], parts[2::2], strict=True)).get("Attributes", "")
    entries = _ENTRY.split(text)
    return {
        name: _inline(" ".join(meaning.split())) for name, meaning in zip(entries[1::2], entries[2::2], strict=True)
    }


def markdown(docstring: str) -> str:
    """Return a docstring as Markdown, with lists in place of its sections."""
    text, *sections = _SECTION.split(docstring)
    for title, section in zip(sections[::2], sections[1::2], strict=True):
        if title not in ("Returns", "Yields"):
            section = _ENTRY.sub(r"- `\1`: ", section)
        text = f"{text.strip()}\n\n**{title}**\n\n{re.sub(r'^ {4,}', '  ', section.strip(), flags=re.M)}"
    return _inline(text)


def _inline(text: str) -> str:
    text = re.sub(r":\w+:`~?(?:[\w.]+\.)?(\w+)`", r"`\1`", text)
    return text.replace("``", "`")


def _first(cls: type[Any]) -> str:
    return _inline((inspect.getdoc(cls) or "").partition("\n")[0])


def _literal(text: str) -> str:
    return re.sub(r"([*_\[])", r"\\\1", text).replace("<", "&lt;")


def _table(head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    lines = ([cell.replace("|", "\\|") for cell in line] for line in (head, ("---",) * len(head), *rows))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


REFERENCES: Mapping[str, Callable[[], str]] = {
    "keys": keys,
    "python": python,
    "metrics": metrics,
    "events": event_reference,
}
"""What each page has below :data:`MARK`."""
MARK = "<!-- made from the code: python docs/references.py -->\n\n"


def pages() -> dict[Path, str]:
    """Return each page as it should be: what is written there above the mark, and the reference."""
    paths = {Path(__file__).with_name(f"{name}.md"): make for name, make in REFERENCES.items()}
    return {path: f"{path.read_text().partition(MARK)[0]}{MARK}{make()}\n" for path, make in paths.items()}


if __name__ == "__main__":
    for page, text in pages().items():
        page.write_text(text)

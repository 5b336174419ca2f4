"""The words of the command line: read, judged one by one and against each other, multiplied out for a sweep."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, get_type_hints

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from orchestrator.config.build import ConfigError, did_you_mean, format_override
from orchestrator.config.redact import MASK, is_secret
from orchestrator.config.schema import Config

GROUPS = ("strategy", "job", "cluster", "tracking", "experiment")


def conf_dir() -> Path:
    """``conf/`` of the checkout, or the copy inside the installed package."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def choices(group: str) -> list[str]:
    """The valid words of a group, from its files."""
    return sorted(p.stem for p in (conf_dir() / group).glob("*.yaml"))


def summary(group: str, word: str) -> str:
    """The comment that opens ``conf/<group>/<word>.yaml``: what the word stands for."""
    first = (conf_dir() / group / f"{word}.yaml").read_text().partition("\n")[0]
    return first.removeprefix("#").strip()


def parse(words: Iterable[str], errors: list[str]) -> list[Override]:
    """Those that can be read; the others are appended to ``errors``."""
    parser = OverridesParser.create()
    parsed: list[Override] = []
    for text in words:
        try:
            parsed.append(parser.parse_override(_kept_as_text(text, parser)))
        except HydraException as e:
            literal = _quoted(text)
            if literal is None:
                errors.append(_unreadable(text, e))
            else:
                parsed.append(parser.parse_override(literal))
    return parsed


def expand_sweep(words: Sequence[str]) -> list[list[str]]:
    """Every combination of the comma-separated values, in order: one list of overrides per run.

    Raises:
        ConfigError: an override cannot be read or is no list of values.
    """
    errors: list[str] = []
    alternatives: list[list[str]] = []
    for override in parse(words, errors):
        key = override.get_key_element()
        if not override.is_sweep_override():
            alternatives.append([str(override.input_line)])
            continue
        try:
            alternatives.append([f"{key}={v}" for v in override.sweep_string_iterator()])
        except HydraException:
            errors.append(f"{_typed(override)}: not a list of values; write {key}=a,b,c")
    if errors:
        raise ConfigError(errors)
    return [list(run) for run in itertools.product(*alternatives)]


def judge(parsed: Sequence[Override], errors: list[str]) -> list[Override]:
    """Those that can be composed, each key once; what is wrong with the others goes to ``errors``."""
    sound: dict[str, Override] = {}
    for override in parsed:
        key = override.key_or_group
        if override.package is not None or not re.fullmatch(r"(?!hydra\b)[\w.-]+", key):
            errors.append(f"{_typed(override)}: unknown key; a key is like train.steps, a group like strategy")
        elif override.is_delete():
            errors.append(f"{_typed(override)}: keys cannot be removed; give another value")
        elif override.is_sweep_override():
            errors.append(f"{_typed(override)}: several values; -m runs them one by one, brackets make a list")
        elif error := group_error(override):
            errors.append(error)
        elif key in sound:
            errors.append(f"{key}: given twice: {_typed(sound[key])} and {_typed(override)}; keep one")
        elif key == "strategy.name":
            errors.append(f"{_typed(override)}: choose with strategy=<word>")
        else:
            sound[key] = override
    if "job" in sound and "job._target_" in sound:
        errors.append("job and job._target_: both name the job; keep one")
    return list(sound.values())


def group_error(override: Override) -> str | None:
    """What is wrong with the word of a group; None for a good one and for keys."""
    key, word = override.key_or_group, override.value()
    if key not in GROUPS or word in choices(key) or (key == "experiment" and word is None):
        return None
    near, valid = did_you_mean(str(word), choices(key)), f"valid: {', '.join(choices(key))}"
    return f"{_typed(override)}: unknown; {near}" + ("" if near == valid else f" ({valid})")


def _typed(override: Override) -> str:
    """The override as it was typed, a secret masked."""
    key = override.key_or_group
    return format_override(key, MASK) if is_secret(key) else str(override.input_line)


def _kept_as_text(text: str, parser: OverridesParser) -> str:
    """The values of a text key in quotes where Hydra would read something else: name=1_0 is no ten."""
    match = re.fullmatch(r"\+*([\w.]+)=([\w.+-]+(?:,[\w.+-]+)*)", text)
    if match is None or match[1] not in text_keys(Config):
        return text
    values = [(v, parser.parse_override(f"key={v}").value()) for v in match[2].split(",")]
    return f"{match[1]}=" + ",".join(v if as_read is None or as_read == v else f"'{v}'" for v, as_read in values)


@functools.cache
def text_keys(section: type[Any], prefix: str = "") -> frozenset[str]:
    """The keys below ``section`` whose values are text."""
    found: set[str] = set()
    hints = get_type_hints(section)
    for name, kind in ((field.name, hints[field.name]) for field in dataclasses.fields(section)):
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            found |= text_keys(kind, f"{prefix}{name}.")
        elif kind in (str, str | None):
            found.add(f"{prefix}{name}")
    return frozenset(found)


def _unreadable(text: str, error: HydraException) -> str:
    key, equals, value = text.partition("=")
    if not equals:
        return f"{text}: expected key=value"
    why = "" if is_secret(key) else f" ({str(error).splitlines()[0]})"
    return f"{format_override(key, value)}: cannot be read{why}; put the value in quotes"


def _quoted(text: str) -> str | None:
    """A value with characters that Hydra keeps for itself, taken as the plain text that it must be: a
    path like ``~/a(1).txt``, an address with ``?a=b``. None where it could be meant otherwise."""
    match = re.fullmatch(r"([\w.+~]+)=([^,'\"\[\]{}$\s=][^,'\"\[\]{}$]*)", text)
    return None if match is None or text.endswith("\\") else f"{match[1]}='{match[2]}'"

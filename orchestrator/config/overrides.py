"""Command-line overrides: parsing, checks of each and of all together, expansion of a sweep."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_type_hints

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override, Quote, QuotedString
from hydra.errors import HydraException

from orchestrator.compat.hydra import own_hydra
from orchestrator.config.build import ConfigError
from orchestrator.config.redact import MASK, Redactor, stands_for_secret
from orchestrator.config.schema import Config
from orchestrator.config.secret_names import is_secret
from orchestrator.config.text import did_you_mean, format_override, to_cli

GROUPS = ("strategy", "job", "cluster", "tracking", "experiment")


def conf_dir() -> Path:
    """Return ``conf/`` of the checkout, or the copy inside the installed package."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "conf"
    return installed if installed.is_dir() else package.parent / "conf"


def choices(group: str) -> list[str]:
    """Return the valid names of a group: one per file in ``conf/<group>/``."""
    return sorted(p.stem for p in (conf_dir() / group).glob("*.yaml"))


def summary(group: str, name: str) -> str:
    """Return the comment in the first line of ``conf/<group>/<name>.yaml``."""
    first_line = (conf_dir() / group / f"{name}.yaml").read_text().partition("\n")[0]
    return first_line.removeprefix("#").strip()


@own_hydra()
def parse(words: Iterable[str], errors: list[str]) -> list[Override]:
    """Return the overrides that can be parsed; append a line to ``errors`` for each of the others."""
    parser = OverridesParser.create()
    parsed: list[Override] = []
    for text in words:
        try:
            parsed.append(parser.parse_override(_quote_text_values(text, parser)))
        except HydraException as e:
            literal = _quoted(text)
            if literal is None:
                errors.append(_parse_error(text, e))
            else:
                parsed.append(parser.parse_override(literal))
    return parsed


def values(words: Iterable[str]) -> dict[str, Any]:
    """Return the value, or the list of swept values, of each override that can be parsed, by its key."""
    found: dict[str, Any] = {}
    for override in parse(words, []):
        value: Any = override.value()
        if override.is_sweep_override():
            value = str(override.input_line).partition("=")[2].split(",")
        found[override.key_or_group] = value
    return found


def with_strategy(words: Iterable[str], strategy: Iterable[str]) -> tuple[str, ...]:
    """Return the overrides ``words`` with the overrides of ``strategy`` in place of their own strategy and its keys."""
    return (*strategy, *(w for w in words if not re.match(r"\+*strategy[.=]", w)))


def masked(word: str, redactor: Redactor) -> str:
    """Return the override ``word`` with its secrets masked: all of its value if the key is secret."""
    key, equals, value = word.partition("=")
    if not equals:
        return redactor.text(word)
    if is_secret(key):
        return f"{key}={MASK}"
    (given,) = values([word]).values() or [value]
    clean = redactor.data(given)
    return redactor.text(word) if clean == given or isinstance(given, str) else f"{key}={to_cli(clean)}"


def expand_sweep(words: Sequence[str], preset: Mapping[str, str] = MappingProxyType({})) -> list[list[str]]:
    """Return every combination of the values of a sweep, in order: one list of overrides per run.

    Args:
        words: overrides, of which some list values: ``a,b``, ``range(1,5)``, ``choice(a,b)``, or, for a group,
            ``glob(*)``.
        preset: the values of further keys, unless ``words`` have them.

    Raises:
        ConfigError: an override cannot be parsed, or its values cannot be listed.
    """
    errors: list[str] = []
    lines = [alternatives(override, errors) for override in parse_sweep(words, preset, errors)]
    if errors:
        raise ConfigError(errors)
    return [list(run) for run in itertools.product(*lines)]


def parse_sweep(words: Sequence[str], preset: Mapping[str, str], errors: list[str]) -> list[Override]:
    """Return the overrides ``words``, and the ones of ``preset`` for keys that ``words`` do not have."""
    given = parse(words, errors)
    keys = {override.key_or_group for override in given}
    return [*given, *parse([f"{key}={value}" for key, value in preset.items() if key not in keys], errors)]


def alternatives(override: Override, errors: list[str]) -> list[str]:
    """Return an override for each value that ``override`` lists. If it lists none, ``errors`` receives the reason."""
    key = override.get_key_element()
    if not override.is_sweep_override():
        return [str(override.input_line)]
    if isinstance(pattern := override.value(), Glob) and key in GROUPS:
        return [f"{key}={name}" for name in pattern.filter(choices(key))]
    if override.is_discrete_sweep() and not isinstance(pattern, Glob):
        return [f"{key}={value}" for value in override.sweep_string_iterator()]
    hint = "; sweep.trials=20 searches an interval with Optuna" if override.is_interval_sweep() else ""
    errors.append(f"{_typed(override)}: cannot be swept; list the values as in {key}=a,b,c{hint}")
    return []


def select_valid(parsed: Sequence[Override], errors: list[str]) -> list[Override]:
    """Return the overrides that can be composed, each key once; append a line to ``errors`` for each of the others."""
    valid: dict[str, Override] = {}
    for override in parsed:
        key = override.key_or_group
        if override.package is not None or not re.fullmatch(r"(?!hydra\b)[\w.-]+", key):
            errors.append(f"{_typed(override)}: unknown key; write keys like train.steps, groups like strategy")
        elif override.is_delete():
            errors.append(f"{_typed(override)}: keys cannot be removed; set another value")
        elif override.is_sweep_override():
            errors.append(f"{_typed(override)}: several values; add -m to run each, or write a list as [a,b]")
        elif error := group_error(override):
            errors.append(error)
        elif stands_for_secret(str(override.input_line)):
            errors.append(f"{_typed(override)}: {MASK} stands for a secret that a run did not store; give the secret")
        elif key in valid:
            errors.append(f"{key}: given twice, as {_typed(valid[key])} and {_typed(override)}; keep one")
        elif key == "strategy.name":
            errors.append(f"{_typed(override)}: cannot be set; choose the strategy with strategy=<name>")
        else:
            valid[key] = override
    if "job" in valid and "job._target_" in valid:
        errors.append("job and job._target_: both name the job; keep one")
    return list(valid.values())


def group_error(override: Override) -> str | None:
    """Return why the name given for a group is invalid; None if it is valid or the override sets a key."""
    group, name = override.key_or_group, override.value()
    if group not in GROUPS or name in choices(group) or (group == "experiment" and name is None):
        return None
    if group == "job" and "." in str(name):
        return f"{_typed(override)}: unknown; for a class of your own, write {format_override('job._target_', name)}"
    hint, valid = did_you_mean(str(name), choices(group)), f"valid: {', '.join(choices(group))}"
    return f"{_typed(override)}: unknown; {hint}" + ("" if hint == valid else f" ({valid})")


@own_hydra()
def quote_text(text: str) -> str:
    """Return ``text`` as it has to be typed for Hydra to read the same text back; in quotes only if necessary."""
    if re.fullmatch(r"[\w./:@%+-]+", text):
        parsed = OverridesParser.create().parse_override(f"key={text}")
        if parsed.value() == text:
            return text
    # A backslash keeps OmegaConf from reading ${...} as an interpolation; those before it have to be doubled.
    literal = re.sub(r"(\\*)\$\{", lambda m: f"{m[1] * 2}\\${{", text)
    return QuotedString(text=literal, quote=Quote.single).with_quotes()


def _typed(override: Override) -> str:
    """Return the override as typed, with its secrets masked."""
    return masked(str(override.input_line), Redactor())


def _quote_text_values(text: str, parser: OverridesParser) -> str:
    """Quote the values of a text key that Hydra would parse as another type, as it does the 1_0 of name=1_0."""
    match = re.fullmatch(r"\+*([\w.]+)=([\w.+-]+(?:,[\w.+-]+)*)", text)
    if match is None or match[1] not in text_keys(Config):
        return text
    values = [(v, parser.parse_override(f"key={v}").value()) for v in match[2].split(",")]
    return f"{match[1]}=" + ",".join(v if parsed is None or parsed == v else f"'{v}'" for v, parsed in values)


@functools.cache
def text_keys(section: type[Any], prefix: str = "") -> frozenset[str]:
    """Return the keys of the dataclass ``section``, and of its subsections, whose values are text."""
    found: set[str] = set()
    hints = get_type_hints(section)
    for name, kind in ((field.name, hints[field.name]) for field in dataclasses.fields(section)):
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            found |= text_keys(kind, f"{prefix}{name}.")
        elif kind in (str, str | None):
            found.add(f"{prefix}{name}")
    return frozenset(found)


def _parse_error(text: str, error: HydraException) -> str:
    key, equals, value = text.partition("=")
    if not equals:
        return f"{text}: expected key=value"
    reason = "" if is_secret(key) else f" ({str(error).splitlines()[0]})"
    return f"{format_override(key, value)}: cannot be parsed{reason}; put the value in quotes"


def _quoted(text: str) -> str | None:
    """Return the override with its value in quotes, for values with characters that Hydra reserves: a path like
    ``~/a(1).txt``, a URL with ``?a=b``. None if the value could be meant as something other than plain text."""
    match = re.fullmatch(r"([\w.+~]+)=([^,'\"\[\]{}$\s=][^,'\"\[\]{}$]*)", text)
    return None if match is None or text.endswith("\\") else f"{match[1]}='{match[2]}'"

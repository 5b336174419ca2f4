"""Command-line overrides: parsing, checks of each and of all together, expansion of a sweep."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from hydra.core.override_parser.types import Glob, IntervalSweep, Override, Quote, QuotedString, RangeSweep
from hydra.errors import HydraException

from orchestrator.compat.hydra import element_text, own_hydra, parse_override
from orchestrator.compat.hydra import quote_text as quote_text
from orchestrator.config.build import ConfigError
from orchestrator.config.files import GROUPS, SHIPPED, Files, instead_of, is_option, options_of
from orchestrator.config.job_source import classes_beside
from orchestrator.config.redact import MASK, Redactor, stands_for_secret
from orchestrator.config.secret_names import is_secret
from orchestrator.config.synonyms import instead_of_choice
from orchestrator.config.text import did_you_mean, format_override
from orchestrator.config.typed import Typed, plain

_UNKNOWN_KEY = "unknown key; write keys like train.steps, groups like strategy"
_TEXTS = "cluster.env."
"""Keys whose values are always texts, also with a comma."""
_KEY = re.compile(r"\+*([\w./-]+)=")
_CLASS = re.compile(r"job=(\w+(?:\.\w+)+)")
"""A class of the user in place of the name of a job, which is short for ``job._target_``."""


@own_hydra()
def parse(words: Iterable[str], errors: list[str]) -> list[Override]:
    """Return the overrides that can be parsed; append a line to ``errors`` for each of the others.

    Options among ``words``, which choose files, are left out.
    """
    words, parsed = list(words), list[Override]()
    for text in words:
        if is_option(text):
            continue
        if (
            (named := _CLASS.fullmatch(text))
            and not text.endswith(".py")
            and Files.of(words).find("job", named[1]) is None
        ):
            text = f"job._target_={named[1]}"
        try:
            parsed.append(_parse(text))
        except (HydraException, ValueError) as e:  # ValueError: a number of thousands of digits
            literal = _quoted(text)
            try:
                parsed.append(_parse(text if literal is None else literal))
            except (HydraException, ValueError):
                errors.append(_parse_error(text, e))
    return parsed


def _parse(text: str) -> Override:
    text.encode()  # an argument of other bytes is an error, because neither Ray nor the records can hold it
    override = parse_override(text, Typed, plain)
    value, typed = override.value(), text.partition("=")[2]
    # Hydra drops the spaces around a value.
    if (
        isinstance(value, str)
        and not isinstance(override._value, QuotedString)
        and typed.strip(" \t") == value != typed
    ):
        override._value = Typed(typed, plain(value))
    return override


def value_of(override: Override) -> Any:
    """Return the value of ``override`` with the texts that were typed; the whole text if it lists several values."""
    return str(override.input_line).partition("=")[2] if override.is_sweep_override() else override.value()


def values(words: Iterable[str]) -> dict[str, Any]:
    """Return the value, or the list of swept values, of each override that can be parsed, by its key."""
    return {
        override.key_or_group: value_of(override).split(",")
        if override.is_sweep_override()
        else plain(override.value())
        for override in parse(words, [])
    }


def last_of_each(words: Iterable[str], say: Callable[[str], None]) -> list[str]:
    """Return ``words`` without overrides of keys that later ones set again: the last one counts, as in Hydra.

    ``say``: receives a note about each of these, without its values, which may be secrets of any form.
    """
    last: dict[str, str] = {}
    for word in words:
        given = None if is_option(word) else _KEY.match(word)
        key = word if given is None else given[1]
        if last.pop(key, None) is not None and given is not None:
            say(f"{key}: given more than once; the last value counts")
        last[key] = word
    return list(last.values())


def choosing(words: Sequence[str], *keys: str) -> list[str]:
    """Return the ``words`` that choose valid files, or that set a single key whose name begins with one of ``keys``."""
    files = Files.of(words)
    valid = (o for o in parse(words, []) if not o.is_sweep_override() and not group_error(o, files))
    lines = (str(o.input_line) for o in valid if files.is_group(o.key_or_group) or o.key_or_group.startswith(keys))
    return [*options_of(words), *lines]


def with_strategy(words: Iterable[str], strategy: Iterable[str]) -> tuple[str, ...]:
    """Return the overrides ``words`` with the overrides of ``strategy`` in place of their own strategy and its keys."""
    return (*strategy, *(w for w in words if not re.match(r"\+*strategy[.=]", w)))


def masked(word: str, redactor: Redactor) -> str:
    """Return the override ``word`` with its secrets masked: all of its value if the key is secret."""
    key, equals, _ = word.partition("=")
    if not equals:
        return redactor.text(word)
    if is_secret(key):
        return f"{key}={MASK}"
    given = [override._value for override in parse([word], []) if isinstance(override._value, (list, dict))]
    clean = redactor.data(given)
    return redactor.text(word) if clean == given else f"{key}={element_text(clean[0])}"


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
    options, files = options_of(words), Files.of(words)
    lines = [alternatives(override, files, errors) for override in parse_sweep(words, preset, errors)]
    if errors:
        raise ConfigError(errors)
    return [[*options, *run] for run in itertools.product(*lines)]


def parse_sweep(words: Sequence[str], preset: Mapping[str, str], errors: list[str]) -> list[Override]:
    """Return the overrides ``words``, and the ones of ``preset`` for keys that ``words`` do not have."""
    given = parse(words, errors)
    keys = {override.key_or_group for override in given}
    return [*given, *parse([f"{key}={value}" for key, value in preset.items() if key not in keys], errors)]


def alternatives(override: Override, files: Files, errors: list[str]) -> list[str]:
    """Return an override for each value that ``override`` lists. If it lists none, ``errors`` receives the reason."""
    key = override.get_key_element()
    if not override.is_sweep_override():
        return [str(override.input_line)]
    if isinstance(pattern := override.value(), Glob) and files.is_group(key.lstrip("+")):
        return [f"{key}={name}" for name in pattern.filter(files.choices(key.lstrip("+")))]
    if override.is_discrete_sweep() and not isinstance(pattern, Glob):
        return [f"{key}={_listed(value)}" for value in override.sweep_iterator()]
    hint = "; sweep.trials=20 searches an interval with Optuna" if override.is_interval_sweep() else ""
    errors.append(f"{_typed(override)}: cannot be swept; list the values as in {key}=a,b,c{hint}")
    return []


def _listed(value: Any) -> str:
    """Return one of several values as an override has it. A text that a function has unquoted gets its quotes back."""
    return quote_text(value) if type(value) is str and "${" not in value else element_text(value)


def select_valid(parsed: Sequence[Override], files: Files, errors: list[str]) -> list[Override]:
    """Return the overrides that can be composed, of each key the last; append a line to ``errors`` for the others."""
    valid: dict[str, Override] = {}
    for override in {override.key_or_group: override for override in parsed}.values():
        key = override.key_or_group
        if re.match(r"hydra\b", key):
            errors.append(instead_of(key))
        elif override.package is not None or not (re.fullmatch(r"[\w.-]+", key) or files.is_group(key)):
            errors.append(f"{_typed(override)}: {_UNKNOWN_KEY}")
        elif override.is_delete():
            errors.append(f"{_typed(override)}: keys cannot be removed; set another value")
        elif override.is_sweep_override() and not key.startswith(_TEXTS):
            errors.append(
                f"{_typed(override)}: several values; add -m to run each, or write a list as [a,b], a text as \"'a,b'\""
            )
        elif error := group_error(override, files):
            errors.append(error)
        elif stands_for_secret(str(override.input_line)):
            errors.append(f"{_typed(override)}: {MASK} stands for a secret that a run did not store; give the secret")
        elif key == "strategy.name":
            errors.append(f"{_typed(override)}: cannot be set; choose the strategy with strategy=<name>")
        else:
            valid[key] = override
    if "job" in valid and "job._target_" in valid:
        errors.append("job and job._target_: both name the job; keep one")
    return list(valid.values())


def group_error(override: Override, files: Files) -> str | None:
    """Return why the name given for a group is invalid; None if it is valid or the override sets a key."""
    group, value = override.key_or_group, plain(override.value())
    if not files.is_group(group):
        return None
    names = [value]
    if group == "experiment" or group not in GROUPS:
        if value is None or isinstance(value, dict):  # keys of a section for which the user has a directory too
            return None
        names = value if isinstance(value, list) else names  # which Hydra composes in this order
    unknown = [str(n) for n in names if not isinstance(n, str) or files.find(group, n) is None]
    if not unknown:
        return None
    name = unknown[0]
    known = files.choices(group)
    if (remedy := instead_of_choice(group, name)) is not None:
        return f"{_typed(override)}: unknown; {remedy}"
    if group == "job" and (name.endswith(".py") or classes_beside(name)):
        return f"{_typed(override)}: {_of_file(name)}"
    hint, valid = did_you_mean(name, known), f"valid: {', '.join(known)}"
    error = f"{_typed(override)}: unknown; {hint}" + ("" if hint == valid else f" ({valid})")
    if group == "job" and hint == valid and name.isidentifier():
        error += f"; for one of your own, go to the directory with conf/job/{name}.yaml, or give job=<module>.<class>"
    return error


@own_hydra()
def key_text(key: Any) -> str | None:
    """Return the key of a mapping as an override has it; None if none can: Hydra knows no quotes there."""
    if not isinstance(key, (str, int, float)):
        return None
    text = element_text(str(key) if isinstance(key, str) else key)
    try:
        read: Any = _parse(f"key={{{text}:0}}").value()
    except HydraException:
        return None
    return text if list(read) == [key] else None


def _typed(override: Override) -> str:
    """Return the override as typed, with its secrets masked."""
    return masked(str(override.input_line), Redactor())


def _parse_error(text: str, error: Exception) -> str:
    key, equals, value = text.partition("=")
    if not equals:
        return f"{text}: {_of_file(text) if text.endswith('.py') else 'expected key=value'}"
    if isinstance(error, UnicodeEncodeError):
        return f"{key.encode(errors='backslashreplace').decode()}: not UTF-8; for a file, type a link with another name"
    try:
        parse_override(f"{key}=", Typed, plain)
    except HydraException:
        return f"{format_override(key, value)}: {_UNKNOWN_KEY}"
    reason = "" if is_secret(key) else f" ({str(error).splitlines()[0]})"
    return f"{format_override(key, value)}: cannot be parsed{reason}; put the value in quotes"


def _of_file(name: str) -> str:
    """Return how a file with code of the user is launched."""
    if classes := classes_beside(name):
        return f"name the class, as in job={classes[0]}"
    of_job = "for a job in it, name the class, as in job=<module>.<class>"
    return (
        f"to run a script, `orchestrator torchrun {name}`; {of_job}" if SHIPPED.find("strategy", "script") else of_job
    )


def _quoted(text: str) -> str | None:
    """Return the override with its value in quotes, for values with characters that Hydra reserves: a path like
    ``~/a(1).txt``, a URL with ``?a=b``. None if the value could be meant as something other than plain text."""
    match = re.fullmatch(r"([\w.+~]+)=([^,'\"\[\]{}$\s=][^,\[\]{}$]*)", text)
    return None if match is None else f"{match[1]}={QuotedString(match[2], Quote.single).with_quotes()}"


@dataclass(frozen=True)
class Interval:
    """The numbers from ``low`` to ``high``: whole ones if both are.

    Attributes:
        log: whether orders of magnitude are searched evenly.
        step: the distance between whole numbers.
    """

    low: float
    high: float
    log: bool = False
    step: int = 1

    @property
    def is_whole(self) -> bool:
        """Whether only whole numbers are meant."""
        return isinstance(self.low, int) and isinstance(self.high, int)


@dataclass(frozen=True)
class Choices:
    """Some values, as typed."""

    values: tuple[str, ...]


Space = Mapping[str, Interval | Choices]
"""What may be tried, by key."""


def search_space(words: Sequence[str], preset: Mapping[str, str] = MappingProxyType({})) -> tuple[list[str], Space]:
    """Return the overrides of all runs of a search, and the values that it may try.

    Args:
        words: overrides, of which some have several values: ``a,b``, ``choice(a,b)``, ``range(1,5)``,
            ``interval(0.1,1)``, or ``tag(log,interval(1e-4,1e-1))``.
        preset: the values of further keys, unless ``words`` have them.

    Raises:
        ConfigError: an override cannot be parsed, or none has several values.
    """
    errors: list[str] = []
    fixed, files = options_of(words), Files.of(words)
    space: dict[str, Interval | Choices] = {}
    for override in parse_sweep(words, preset, errors):
        if not override.is_sweep_override():
            fixed.append(str(override.input_line))
        elif (tried := _values(override, files, errors)) is not None:
            space[override.get_key_element()] = tried
    if not space and not errors:
        errors.append("sweep.trials: nothing to search; give a key several values, as in 'job.lr=interval(0.01,1)'")
    if errors:
        raise ConfigError(errors)
    return fixed, space


def _values(override: Override, files: Files, errors: list[str]) -> Interval | Choices | None:
    match override.value():
        case IntervalSweep(start=low, end=high, tags=tags) if low is not None and high is not None:
            return Interval(low, high, log="log" in tags)
        case RangeSweep(start=int() as start, stop=int() as stop, step=int() as step) if 0 < step <= stop - start:
            return Interval(start, start + (stop - 1 - start) // step * step, step=step)
    listed = tuple(line.partition("=")[2] for line in alternatives(override, files, errors))
    return Choices(listed) if listed else None


def is_search(words: Sequence[str], preset: Mapping[str, str] = MappingProxyType({})) -> bool:
    """Return whether a launch with these overrides is a search. It takes the arguments of :func:`search_space`."""
    return {**preset, **values(words)}.get("sweep.trials") is not None


def example(words: Sequence[str], preset: Mapping[str, str] = MappingProxyType({})) -> list[str]:
    """Return the overrides of one run of a search, to check what all runs share. Raises like :func:`search_space`."""
    fixed, space = search_space(words, preset)
    first = {key: s.low if isinstance(s, Interval) else s.values[0] for key, s in space.items()}
    return [*fixed, *(f"{key}={value}" for key, value in first.items())]

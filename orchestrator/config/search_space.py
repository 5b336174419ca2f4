"""The values that a search may try, as the overrides give them: intervals, ranges and choices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep

from orchestrator.config.build import ConfigError
from orchestrator.config.files import Files, options_of
from orchestrator.config.overrides import alternatives, parse_sweep, values


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

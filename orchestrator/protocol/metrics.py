"""Metrics: what one rank measured, and how the run's value of it is computed and shown.

To add a metric, declare a :class:`MetricSpec` beside the code that measures it and put ``SPEC.of(value)`` into the
metrics of a logged point: for the training loop in ``worker/measure/step_metrics.py``, for a strategy in its
``metrics()``. The spec travels with the value, so that the progress line, the summary and ``compare`` show it without
further changes.
A metric that is only logged needs no spec: ``Metric(value, reduce="mean")``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Reduce = Literal["sum", "mean", "max", "lead"]
"""How the values of all ranks become the run's; ``lead`` is the value of rank 0."""

Derive = Literal["last", "median", "p95", "harmonic_mean"]
"""How the values of all steps become one value in the summary."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of ``compare``.

    Attributes:
        position: columns stand in ascending order of it.
        always: whether the column appears even if no run has a value.
        beside: the key of a second summary value, shown in parentheses.
        priority: a narrow terminal leaves out the columns of the lowest priority first; None if it never does.
    """

    heading: str
    position: int = 100
    always: bool = False
    beside: str | None = None
    priority: int | None = 0


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A value under ``key`` in the summary of a run, derived from the values of a metric."""

    key: str
    derive: Derive = "last"
    column: Column | None = None


@dataclass(frozen=True, kw_only=True)
class MetricSpec:
    """A declared metric.

    Attributes:
        name: the name that it is logged by, for example ``train/loss``.
        reduce: how the values of all ranks become the run's.
        format: ``number`` (four significant digits), ``rate``, or a ``str.format`` template such as ``{:.1f} ms``.
        progress: its text on the progress line, for example ``loss {}``; None if it is not shown there.
        summaries: the values in the run's summary that are derived from it.
    """

    name: str
    reduce: Reduce = "lead"
    format: str = "number"
    progress: str | None = None
    summaries: tuple[Summary, ...] = ()

    def of(self, value: float) -> Metric:
        """Return ``value`` as one rank's value of this metric."""
        return Metric(value, self.reduce, self)


def wait_metric(operation: str) -> MetricSpec:
    """Return the metric of the time that a step waits for an operation with other ranks."""
    return MetricSpec(name=f"perf/{operation}_ms", reduce="mean", format="{:.3g}")


@dataclass(frozen=True)
class Metric:
    """One rank's value of a metric. ``spec`` is None for a metric that is only logged."""

    value: float
    reduce: Reduce
    spec: MetricSpec | None = None


def measured(values: Mapping[MetricSpec, float | None]) -> dict[str, Metric]:
    """Return one rank's metrics by name, leaving out those whose value is None."""
    return {spec.name: spec.of(value) for spec, value in values.items() if value is not None}


def total(values: Iterable[float]) -> float:
    """Return the sum of values, as exact as it can be; not finite if one of them is not, or the sum is too large."""
    values = list(values)
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):  # which stands for infinities of both signs
        return sum(values)


def reduce_over_ranks(metrics: Mapping[int, Metric]) -> float | None:
    """Return the run's value of one metric.

    Args:
        metrics: the metric by rank; at least one.

    Returns:
        None if only rank 0 counts and it has no value.
    """
    values = [metrics[rank].value for rank in sorted(metrics)]
    match next(iter(metrics.values())).reduce:
        case "sum":
            return total(values)
        case "mean":
            return total(values) / len(values)
        case "max":
            return max(values)
        case "lead":
            return metrics[0].value if 0 in metrics else None


def summary_value(summary: Mapping[str, Any], key: str) -> float | None:
    """Return the number under ``key`` of a run's summary; None if there is none or it is not finite."""
    found = summary.get(key)
    return float(found) if isinstance(found, (int, float)) and math.isfinite(found) else None


def waited_s(summary: Mapping[str, Any]) -> float:
    """Return how long a run has waited for its turns and for resources, in seconds."""
    return sum(summary_value(summary, key) or 0.0 for key in ("queue_s", "waited_s"))


class MetricRegistry:
    """The metrics of a run by name, in the order of their declaration."""

    def __init__(self, specs: Iterable[MetricSpec] = ()):
        self._specs = {spec.name: spec for spec in specs}

    def __iter__(self) -> Iterator[MetricSpec]:
        return iter(self._specs.values())

    def __getitem__(self, name: str) -> MetricSpec:
        return self._specs[name]

    def __contains__(self, name: str) -> bool:
        return name in self._specs

    def add(self, spec: MetricSpec) -> None:
        """Register ``spec``, unless its name is already registered."""
        self._specs.setdefault(spec.name, spec)


def to_record(spec: MetricSpec) -> dict[str, Any]:
    """Return ``spec`` as plain values for a JSON file, without the fields that have their default value."""
    return dataclasses.asdict(spec, dict_factory=_without_defaults)


def from_record(record: Any) -> MetricSpec | None:
    """Return the spec that :func:`to_record` wrote; None if ``record`` is not one."""
    try:
        summaries = []
        for summary in record.get("summaries", ()):
            column = summary.get("column")
            summaries.append(Summary(**{**summary, "column": None if column is None else Column(**column)}))
        spec = MetricSpec(**{**record, "summaries": tuple(summaries)})
    except (AttributeError, TypeError):
        return None
    return spec if isinstance(spec.name, str) and isinstance(spec.format, str) else None


_DEFAULTS = {
    field.name: field.default
    for cls in (MetricSpec, Summary, Column)
    for field in dataclasses.fields(cls)
    if field.name != "reduce"
}


def _without_defaults(items: list[tuple[str, Any]]) -> dict[str, Any]:
    return {key: value for key, value in items if key not in _DEFAULTS or value != _DEFAULTS[key]}


OTHERS_CPU_PCT, IDLE_CPU_PCT, OTHERS_GPU_PCT = "others_cpu_pct", "idle_cpu_pct", "others_gpu_pct"
"""Keys of the summary of a run: of the node, or of the GPU, of which others used the largest part."""

SHARED_FROM_PCT = 10.0


@dataclass(frozen=True, kw_only=True)
class MachineUse:
    """CPU seconds on a node in an interval, and the use of a worker's GPU in it.

    Attributes:
        own_s: the seconds of a process and of the processes that it has started.
        busy_s: the seconds of all processes.
        idle_s: those that no process used.
        others_gpu_pct: the share of the time in which other processes used the GPU; None if that is unknown.
    """

    own_s: float
    busy_s: float
    idle_s: float
    others_gpu_pct: float | None = None


def describe_sharing(summary: Mapping[str, Any]) -> str | None:
    """Return what other programs used while a run was timed; None if not so much that it was slowed.

    CPUs are taken from a run only if less of them stood idle than others used.
    """
    cpu, idle, gpu = (summary_value(summary, key) or 0.0 for key in (OTHERS_CPU_PCT, IDLE_CPU_PCT, OTHERS_GPU_PCT))
    parts = [f"{cpu:.0f}% of the CPUs"] if cpu >= max(SHARED_FROM_PCT, idle) else []
    parts += [f"{gpu:.0f}% of a GPU"] if gpu >= SHARED_FROM_PCT else []
    return " and ".join(parts) or None

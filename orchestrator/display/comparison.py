"""A run as a comparison needs it, from ``run.json``, and the mean of its repeats. Imports neither MLflow nor torch."""

from __future__ import annotations

import functools
import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from orchestrator.planning.mesh import recorded_mesh
from orchestrator.protocol.core_metrics import LOSS, SAMPLES_PER_S, SAMPLES_SEEN
from orchestrator.protocol.metrics import MetricSpec, from_record, summary_value
from orchestrator.records.journal import read_metrics
from orchestrator.records.run_dir import RunDir

RATE = SAMPLES_PER_S.summaries[0].key
FINAL_LOSS = LOSS.summaries[0].key
CURVE_METRICS = (LOSS.name, SAMPLES_SEEN.name)
"""The metrics that :func:`curve_of` needs."""
NO_EFFECT = (
    "name",
    "plan",
    "tracking.",
    "storage.",
    "sweep.",
    "checkpoint.keep",
    "cluster.dashboard",
    "cluster.address",
    "cluster.queue",
    "cluster.priority",
    "cluster.user_share",
)
"""Keys that change neither speed nor loss; and all timeouts."""
_MACHINE = ("host", "processor", "cores", "device")
_COMMIT = "source.git.commit"


class CompareError(Exception):
    """There are no runs, or one cannot be read."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """``train/loss`` at each logged point, against samples and against seconds since the first."""

    losses: Sequence[float] = ()
    samples: Sequence[float] = ()
    seconds: Sequence[float] = ()

    def seconds_to(self, loss: float) -> float | None:
        """Return the seconds from the first point to the first one with at most this ``loss``; None without one."""
        return next((s for s, value in zip(self.seconds, self.losses, strict=True) if value <= loss), None)


@dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """A run, or the mean of ``repeats`` runs of one configuration.

    Attributes:
        name: the name of its directory.
        location: the directory, or the place on a tracking server; it identifies the run.
        work: equal for runs of the same job with the same fields.
        workers: the number of devices that train; None if it is unknown.
        params: the configuration by dotted key.
        machine: what ran it: host, processor, cores, device, versions, commit.
        started: seconds since the epoch; None if it is unknown.
        settings: in which it differs from the other runs of its sweep; empty if it belongs to none.
        metrics: those that the run declares.
        repeats: the number of runs that it stands for.
        spread: by key of the summary, half the range of the repeats.
    """

    name: str
    location: str
    state: str
    strategy: str
    job: str
    work: str
    workers: int | None
    summary: Mapping[str, Any]
    params: Mapping[str, Any] = field(default_factory=dict)
    machine: Mapping[str, str] = field(default_factory=dict)
    started: float | None = None
    settings: str = ""
    metrics: tuple[MetricSpec, ...] = ()
    curve: Callable[[], Curve] = Curve
    repeats: int = 1
    spread: Mapping[str, float] = field(default_factory=dict)

    def value(self, key: str) -> float | None:
        """Return the number under ``key`` of the summary; None if there is none or it is not finite."""
        return summary_value(self.summary, key)


def read_run(path: Path) -> ComparedRun:
    """Read ``run.json`` of the run directory ``path``.

    Raises:
        CompareError: it is missing or not readable.
    """
    run_dir = RunDir(path.resolve())
    try:
        record = run_dir.read_record()
    except (OSError, ValueError) as e:
        raise CompareError(f"{e}; leave this run out or remove it") from None
    if not record:
        raise CompareError(f"{path}: not a run directory, it has no run.json")
    curve = functools.partial(read_curve, run_dir)
    return run_of(record, name=run_dir.path.name, location=str(run_dir.path), curve=curve)


def read_curve(run_dir: RunDir) -> Curve:
    """Return the loss curve of a run directory; empty if it has logged no loss."""
    return curve_of((time, metrics) for _, time, metrics in read_metrics(run_dir))


def run_of(record: Mapping[str, Any], *, name: str, location: str, curve: Callable[[], Curve]) -> ComparedRun:
    """Return the run with the contents ``record`` of ``run.json``; unexpected values are left out."""
    params, started = record.get("params"), record.get("started")
    params = params if isinstance(params, Mapping) else {}
    return ComparedRun(
        name=name,
        location=location,
        state=str(record.get("state") or "-"),
        strategy=str(record.get("strategy") or "-"),
        job=str(record.get("job") or "-"),
        work=json.dumps([record.get("job"), {k: v for k, v in params.items() if k.startswith("job.")}], sort_keys=True),
        workers=_workers(record.get("plan")),
        summary=record.get("summary") or {},
        params=params,
        machine=_machine(record),
        started=float(started) if isinstance(started, (int, float)) else None,
        settings=str((record.get("sweep") or record).get("settings") or ""),
        metrics=_metrics(record.get("metrics")),
        curve=curve,
    )


def curve_of(points: Iterable[tuple[float, Mapping[str, float]]]) -> Curve:
    """Return the loss curve of ``(time, metrics)`` points; empty if they have no loss."""
    found = [(m[LOSS.name], m[SAMPLES_SEEN.name], t) for t, m in points if LOSS.name in m and SAMPLES_SEEN.name in m]
    return Curve(
        losses=[loss for loss, _, _ in found],
        samples=[samples for _, samples, _ in found],
        seconds=[time - found[0][2] for _, _, time in found],
    )


def setting_text(value: Any) -> str:
    """Return the value of a setting as text, the same from ``run.json`` and from MLflow."""
    return "null" if value is None or value == "None" else str(value)  # MLflow has the text of Python


def configuration(run: ComparedRun) -> str:
    """Return a text that is equal for the repeats of a run: all settings except the seed, the device and the host."""
    params = {k: setting_text(v) for k, v in run.params.items() if k != "seed" and not k.startswith(NO_EFFECT)}
    place = [run.machine.get("host"), run.machine.get("device")]
    return json.dumps([run.strategy, run.workers, run.work, params, place], sort_keys=True)


def repeats(runs: Sequence[ComparedRun]) -> list[list[ComparedRun]]:
    """Return the groups of finished runs of one configuration. Runs without recorded settings are in none."""
    groups: dict[str, list[ComparedRun]] = {}
    for run in runs:
        if run.state == "finished" and run.params:
            groups.setdefault(configuration(run), []).append(run)
    return [group for group in groups.values() if len(group) > 1]


def mean_of(group: Sequence[ComparedRun]) -> ComparedRun:
    """Return one run with the means of the ``group``."""
    keys = dict.fromkeys(key for run in group for key in run.summary)
    values = {key: [v for run in group if (v := run.value(key)) is not None] for key in keys}
    complete = {key: found for key, found in values.items() if len(found) == len(group)}
    return replace(
        group[0],
        name=f"{group[0].name}, {len(group)} runs",
        summary={key: statistics.fmean(found) for key, found in complete.items()},
        spread={key: (max(found) - min(found)) / 2 for key, found in complete.items()},
        repeats=len(group),
        curve=lambda: _mean_curve([run.curve() for run in group]),
    )


def _mean_curve(curves: Sequence[Curve]) -> Curve:
    """The mean of curves at the points that all of them have."""

    def mean(columns: Iterable[Sequence[float]]) -> list[float]:
        return [statistics.fmean(values) for values in zip(*columns, strict=False)]

    return Curve(
        losses=mean(c.losses for c in curves),
        samples=mean(c.samples for c in curves),
        seconds=mean(c.seconds for c in curves),
    )


def _metrics(records: object) -> tuple[MetricSpec, ...]:
    found = [from_record(record) for record in records] if isinstance(records, list) else []
    return tuple(spec for spec in found if spec is not None)


def _workers(plan: object) -> int | None:
    mesh = plan.get("mesh") if isinstance(plan, Mapping) else None
    if not isinstance(plan, Mapping) or not isinstance(mesh, Mapping):
        return None
    try:
        return recorded_mesh(mesh).num_workers * int(plan.get("devices_per_worker") or 1)
    except (TypeError, ValueError):
        return None


def _machine(record: Mapping[str, Any]) -> dict[str, str]:
    tags, source = record.get("tags"), record.get("source")
    tags = tags if isinstance(tags, Mapping) else {}
    commit = source.get(_COMMIT) if isinstance(source, Mapping) else tags.get(f"mlflow.{_COMMIT}")
    kept = {k: str(v) for k, v in tags.items() if k in _MACHINE or k.startswith("version.")}
    return kept if commit is None else {**kept, "commit": str(commit)[:9]}

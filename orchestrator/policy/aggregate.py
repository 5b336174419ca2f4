"""The metrics of the whole run, computed from the points of its ranks. Pure."""

from __future__ import annotations

import math
import random
import statistics
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from orchestrator.planning.mesh import Mesh
from orchestrator.protocol.core_metrics import (
    BUBBLE_PCT,
    BUBBLE_THEORY_PCT,
    BUSIEST_PCT,
    COMM_MS,
    COMM_PCT,
    COMPUTE_MS,
    CORE_METRICS,
    DATA_WAIT_MS,
    DATA_WAIT_PCT,
    FLOPS_PER_SAMPLE,
    IDLE_MS,
    LOSS,
    MFU_PCT,
    PEAK_MEMORY_MB,
    SAMPLES_PER_S,
    SAMPLES_PER_S_PER_WORKER,
    STEP_MS,
    TOKENS_PER_S,
    evaluation_metrics,
    evaluation_specs,
    sums_by_weight,
)
from orchestrator.protocol.events import MetricsLogged
from orchestrator.protocol.messages import EvalPoint, TrainPoint
from orchestrator.protocol.metrics import MetricRegistry, MetricSpec, Summary, reduce_over_ranks, total
from orchestrator.timeline import Timeline, aligned, theoretical_bubble

MOST_KEPT = 16384
"""Keep all values up to this number, and beyond it a random sample of so many."""
_MOST_RANKS = 16
"""The memory of each rank is logged up to this number of ranks."""


class RunningValues:
    """Summarises all values so far.

    The harmonic mean is exact. The percentiles are exact for up to :data:`MOST_KEPT` values. Beyond that, each value is
    equally likely to be in the sample (reservoir sampling). In 997 of 1,000 cases, the returned median is then between
    the percentiles 48.8 and 51.2, and the returned 95th percentile is between 94.5 and 95.5. The generator has a fixed
    seed, so equal values give equal summaries.
    """

    def __init__(self) -> None:
        self._kept = array("d")
        self._count = 0
        self._least = math.inf
        self._inverse_sum = 0.0
        self._random = random.Random(0)

    def extend(self, values: Iterable[float]) -> None:
        """Add values, oldest first."""
        for value in values:
            self._count += 1
            self._least = min(self._least, value)
            self._inverse_sum += 1 / value if value else 0.0
            if self._count <= MOST_KEPT:
                self._kept.append(value)
            elif (place := self._random.randrange(self._count)) < MOST_KEPT:
                self._kept[place] = value

    def derive(self, how: Literal["median", "p95", "harmonic_mean"]) -> float | None:
        """Return one value for the summary; None if there are no values."""
        if not self._kept:
            return None
        match how:
            case "median":
                return statistics.median(self._kept)
            case "p95":
                return percentile(self._kept, 0.95)
            case "harmonic_mean":  # of the rates of equal amounts of work: the rate of all the work
                return self._count / self._inverse_sum if self._least > 0 else 0.0


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that ``share`` (0 to 1) of the values do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


class Aggregator:
    """Collects the points of a step until every rank has sent its own.

    ``timeline`` is the last step after warm-up whose stages were timed, None if there is none.
    """

    def __init__(self, *, mesh: Mesh, global_batch_size: int, tokens_per_sample: int | None):
        self.timeline: Timeline | None = None
        self._mesh = mesh
        self._global_batch_size = global_batch_size
        self._tokens_per_sample = tokens_per_sample
        self._registry = MetricRegistry(CORE_METRICS)
        self._train: dict[int, dict[int, TrainPoint]] = {}
        self._reported: dict[int, int] = {}  # the last step of each rank that has sent a point in this generation
        self._waited_for: set[int] = set()  # the incomplete steps of the round before
        self._passed = 0  # the last step that was logged without the parts of all ranks
        self._eval: dict[int, dict[int, EvalPoint]] = {}
        self._values: dict[str, RunningValues] = {}
        self._theoretical_bubble: float | None = None
        self._last: dict[str, float] = {}

    def add(self, rank: int, point: TrainPoint | EvalPoint) -> MetricsLogged | None:
        """Add a rank's point; returns the metrics of its step once the points of all ranks are there, else None."""
        if isinstance(point, EvalPoint):
            evals = self._eval.setdefault(point.step, {})
            evals[rank] = point
            if len(evals) < self._mesh.world_size:
                return None
            metrics = evaluation_metrics(list(self._eval.pop(point.step).values()))
            for spec in evaluation_specs(point):
                self._registry.add(spec)
        else:
            self._reported[rank] = point.step
            if point.step <= self._passed:
                return None
            parts = self._train.setdefault(point.step, {})
            parts[rank] = point
            if len(parts) < self._mesh.world_size:
                return None
            metrics = self._train_metrics(self._train.pop(point.step))
        return self._logged(point, metrics)

    def incomplete(self, *, final: bool = False) -> list[MetricsLogged]:
        """Return the metrics of steps that some ranks do not report, as a script may, after a round of heartbeats.

        Every rank that has reported anything is past such a step, and the round before had it too, unless this one is
        ``final``: the part of another rank may come with its next heartbeat.
        """
        reached = min(self._reported.values(), default=0)
        due = [step for step in sorted(self._train) if final or (step <= reached and step in self._waited_for)]
        logged = []
        for step in due:
            parts = self._train.pop(step)
            logged.append(self._logged(parts[min(parts)], self._train_metrics(parts)))
            self._passed = step
        self._waited_for = set(self._train)
        return logged

    def _logged(self, point: TrainPoint | EvalPoint, metrics: Mapping[str, float]) -> MetricsLogged:
        self._last.update(metrics)
        specs = tuple(self._registry[name] for name in metrics if name in self._registry)
        return MetricsLogged(step=point.step, time=point.time, metrics=metrics, specs=specs)

    def begin_generation(self, mesh: Mesh) -> None:
        """Drop incomplete points: a lost rank will never send its part."""
        self._mesh, self._theoretical_bubble = mesh, None
        self._train.clear()
        self._eval.clear()
        self._reported.clear()
        self._passed = 0

    def specs(self) -> tuple[MetricSpec, ...]:
        """Return the specs of the metrics that this launch has logged."""
        return tuple(spec for spec in self._registry if spec.name in self._last)

    def summary(self) -> dict[str, Any]:
        """Return the summary of this launch; unknown values are left out."""
        return {
            summary.key: value
            for spec in self._registry
            for summary in spec.summaries
            if (value := self._summary_value(spec, summary)) is not None
        }

    def _summary_value(self, spec: MetricSpec, summary: Summary) -> float | None:
        if summary.derive == "last":
            return self._last.get(spec.name)
        values = self._values.get(spec.name)
        return None if values is None else values.derive(summary.derive)

    def _record(self, spec: MetricSpec, values: Iterable[float]) -> None:
        """Add values for the summaries that need more than the last one."""
        if any(summary.derive != "last" for summary in spec.summaries):
            self._values.setdefault(spec.name, RunningValues()).extend(values)

    def _train_metrics(self, parts: Mapping[int, TrainPoint]) -> dict[str, float]:
        lead = parts[min(parts)]
        weight = total(p.weight for p in parts.values())
        metrics: dict[str, float] = {}
        if weight > 0:
            metrics[LOSS.name] = total(p.loss_sum for p in parts.values()) / weight
        if lead.step_ms:
            metrics |= self._speed_metrics(parts, lead.step_ms)
        peaks = {rank: p.peak_memory_mb for rank, p in parts.items() if p.peak_memory_mb is not None}
        if peaks:
            metrics[PEAK_MEMORY_MB.name] = max(peaks.values())
        if 1 < len(parts) <= _MOST_RANKS:
            metrics |= {f"memory/rank_{rank}_peak_mb": peaks[rank] for rank in sorted(peaks)}
        metrics |= sums_by_weight("train/", [(p.sums, p.step_weight) for p in parts.values()])
        metrics |= self._measured_metrics(parts)
        idle_ms = 0.0
        if all(p.spans for p in parts.values()):
            timeline = self._timeline_of(parts)
            metrics |= self._pipeline_metrics(timeline, parts.values())
            idle_ms = 1e3 * timeline.idle_s
        if DATA_WAIT_PCT.name in metrics:
            metrics |= self._parts_of_step(metrics, idle_ms=idle_ms)
        return metrics

    def _speed_metrics(self, parts: Mapping[int, TrainPoint], steps_ms: Sequence[float]) -> dict[str, float]:
        step_ms = statistics.fmean(steps_ms)
        self._record(STEP_MS, steps_ms)
        reported = [p.samples for p in parts.values() if p.samples is not None]
        num_steps = parts[min(parts)].num_steps or len(steps_ms)
        batch_size = total(reported) / num_steps if reported else self._global_batch_size
        if not batch_size:
            return {STEP_MS.name: step_ms}
        rate = batch_size / step_ms * 1e3
        rates = [batch_size / ms * 1e3 for ms in steps_ms if ms > 0]
        self._record(SAMPLES_PER_S, rates)
        self._record(SAMPLES_PER_S_PER_WORKER, (r / self._mesh.num_workers for r in rates))
        metrics = {
            STEP_MS.name: step_ms,
            SAMPLES_PER_S.name: rate,
            SAMPLES_PER_S_PER_WORKER.name: rate / self._mesh.num_workers,
        }
        if self._tokens_per_sample:
            metrics[TOKENS_PER_S.name] = rate * self._tokens_per_sample
            self._record(TOKENS_PER_S, (r * self._tokens_per_sample for r in rates))
        if reported:
            return metrics  # a script does not say what its steps consist of
        workers = [p for rank, p in parts.items() if rank not in self._mesh.servers]
        metrics |= self._compute_metrics(workers, steps_ms)
        waits = {DATA_WAIT_PCT: 100 * statistics.fmean(p.data_wait_ms for p in workers) / step_ms}
        comm = [p.comm_share for p in workers if p.comm_share is not None]
        if comm:
            waits[COMM_PCT] = 100 * statistics.fmean(comm)
        for spec, pct in waits.items():
            self._record(spec, [pct])
            metrics[spec.name] = pct
        return metrics

    def _compute_metrics(self, workers: Sequence[TrainPoint], steps_ms: Sequence[float]) -> dict[str, float]:
        """The metrics of the work that the devices do; those that some worker does not know are left out."""
        metrics = {}
        flops = [p.flops for p in workers if p.flops is not None]
        if len(flops) == len(workers):
            metrics[FLOPS_PER_SAMPLE.name] = math.fsum(flops) / self._global_batch_size
        at_peak_ms = [p.flops_at_peak_ms for p in workers if p.flops_at_peak_ms is not None]
        if len(at_peak_ms) == len(workers):
            mean_ms = statistics.fmean(at_peak_ms)
            metrics[MFU_PCT.name] = 100 * mean_ms / statistics.fmean(steps_ms)
            self._record(MFU_PCT, (100 * mean_ms / ms for ms in steps_ms if ms > 0))
        return metrics

    def _measured_metrics(self, parts: Mapping[int, TrainPoint]) -> dict[str, float]:
        """The metrics that ranks report directly, each reduced by its own rule."""
        metrics = {}
        for name in sorted({name for p in parts.values() for name in p.metrics}):
            by_rank = {rank: p.metrics[name] for rank, p in parts.items() if name in p.metrics}
            value = reduce_over_ranks(by_rank)
            if value is None:
                continue
            metric = next(iter(by_rank.values()))
            self._registry.add(metric.spec or MetricSpec(name=name, reduce=metric.reduce))
            self._record(self._registry[name], [value])
            metrics[name] = value
        return metrics

    def _parts_of_step(self, metrics: Mapping[str, float], *, idle_ms: float) -> dict[str, float]:
        """Divide the time of a step, of which a worker waits ``idle_ms`` for other stages."""
        step_ms = metrics[STEP_MS.name]
        waits = {
            COMM_MS: step_ms * metrics.get(COMM_PCT.name, 0.0) / 100,
            DATA_WAIT_MS: step_ms * metrics[DATA_WAIT_PCT.name] / 100,
            IDLE_MS: min(idle_ms, step_ms),
        }
        values = {COMPUTE_MS: max(0.0, step_ms - math.fsum(waits.values())), **waits}
        for spec, ms in values.items():
            self._record(spec, [ms])
        return {spec.name: ms for spec, ms in values.items()}

    def _timeline_of(self, parts: Mapping[int, TrainPoint]) -> Timeline:
        """Keep and return what the stages did in a step."""
        replicas = [aligned([parts[rank].spans for rank in ranks]) for ranks in self._mesh.groups("pipeline")]
        if self._theoretical_bubble is None:  # every step has the same order of actions
            self._theoretical_bubble = theoretical_bubble(replicas[0])
        self.timeline = Timeline(step=parts[0].step, replicas=replicas, theoretical_bubble=self._theoretical_bubble)
        return self.timeline

    def _pipeline_metrics(self, timeline: Timeline, parts: Iterable[TrainPoint]) -> dict[str, float]:
        self._record(BUBBLE_PCT, [100 * timeline.bubble])
        self._record(BUSIEST_PCT, [100 * timeline.busiest])
        metrics = {
            BUBBLE_PCT.name: 100 * timeline.bubble,
            BUSIEST_PCT.name: 100 * timeline.busiest,
            BUBBLE_THEORY_PCT.name: 100 * timeline.theoretical_bubble,
        }
        for stage, share in timeline.stage_busy().items():
            metrics[f"pipeline/stage_{stage}_busy_pct"] = 100 * share
        for part in parts:
            for stage in sorted({s.stage for s in part.spans}):
                name = f"pipeline/stage_{stage}_peak_memory_mb"
                if part.peak_memory_mb is not None:
                    metrics[name] = max(part.peak_memory_mb, metrics.get(name, 0.0))
        return metrics

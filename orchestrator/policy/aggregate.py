"""From the ranks' parts to figures of the whole run. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

from orchestrator.planning.mesh import Mesh
from orchestrator.protocol.events import MetricsLogged
from orchestrator.protocol.messages import EvalPoint, TrainPoint
from orchestrator.protocol.metrics import reduce_over_ranks
from orchestrator.timeline.ideal import theoretical_bubble
from orchestrator.timeline.spans import Timeline


class Aggregator:
    """Collects the parts of each point until every rank has sent its own.

    ``timeline`` is the last step after warm-up, where stages were timed.
    """

    def __init__(self, *, mesh: Mesh, global_batch_size: int, tokens_per_sample: int | None):
        self.timeline: Timeline | None = None
        self._mesh = mesh
        self._global_batch_size = global_batch_size
        self._tokens_per_sample = tokens_per_sample
        self._train: dict[int, dict[int, TrainPoint]] = {}
        self._eval: dict[int, dict[int, EvalPoint]] = {}
        self._step_ms: list[float] = []
        self._bubbles: list[float] = []
        self._theoretical_bubble: float | None = None
        self._last: dict[str, float] = {}

    def add(self, rank: int, point: TrainPoint | EvalPoint) -> MetricsLogged | None:
        """The figures of a step once all ranks' parts are there."""
        if isinstance(point, EvalPoint):
            evals = self._eval.setdefault(point.step, {})
            evals[rank] = point
            if len(evals) < self._mesh.world_size:
                return None
            metrics = _eval_metrics(list(self._eval.pop(point.step).values()))
        else:
            parts = self._train.setdefault(point.step, {})
            parts[rank] = point
            if len(parts) < self._mesh.world_size:
                return None
            metrics = self._train_metrics(self._train.pop(point.step))
        self._last.update(metrics)
        return MetricsLogged(step=point.step, time=point.time, metrics=metrics)

    def begin_generation(self, mesh: Mesh) -> None:
        """Give up the points that a rank that is gone will never complete."""
        self._mesh, self._theoretical_bubble = mesh, None
        self._train.clear()
        self._eval.clear()

    def summary(self) -> dict[str, Any]:
        """Figures of this launch; what is unknown is left out."""
        summary: dict[str, Any] = {}
        if self._step_ms:
            summary["samples_per_s"] = self._global_batch_size * len(self._step_ms) / sum(self._step_ms) * 1e3
            summary["step_ms_p50"] = statistics.median(self._step_ms)
            summary["step_ms_p95"] = percentile(self._step_ms, 0.95)
        for key, name in (
            ("final_loss", "train/loss"),
            ("val_loss", "val/loss"),
            ("val_accuracy", "val/accuracy"),
            ("peak_memory_mb", "perf/peak_memory_mb"),
            ("bubble_theory_pct", "pipeline/bubble_theory_pct"),
        ):
            if name in self._last:
                summary[key] = self._last[name]
        if self._bubbles:
            summary["bubble_pct"] = 100 * statistics.median(self._bubbles)
        return summary

    def _train_metrics(self, parts: Mapping[int, TrainPoint]) -> dict[str, float]:
        lead = parts[0]
        weight = math.fsum(p.weight for p in parts.values())
        metrics = {
            "train/samples_seen": float(lead.samples_seen),
            "train/epoch": lead.epoch,
            "train/lr": lead.lr,
        }
        if weight > 0:
            metrics["train/loss"] = math.fsum(p.loss_sum for p in parts.values()) / weight
        if lead.grad_norm is not None:
            metrics["train/grad_norm"] = lead.grad_norm
        if lead.step_ms:
            self._step_ms.extend(lead.step_ms)
            step_ms = statistics.fmean(lead.step_ms)
            rate = self._global_batch_size / step_ms * 1e3
            metrics["perf/step_ms"] = step_ms
            metrics["perf/samples_per_s"] = rate
            metrics["perf/samples_per_s_per_worker"] = rate / self._mesh.num_workers
            if self._tokens_per_sample:
                metrics["perf/tokens_per_s"] = rate * self._tokens_per_sample
            workers = [p for rank, p in parts.items() if rank not in self._mesh.shards]
            data_wait_ms = statistics.fmean(p.data_wait_ms for p in workers)
            metrics["perf/data_wait_pct"] = 100 * data_wait_ms / step_ms
            comm = [p.comm_share for p in workers if p.comm_share is not None]
            if comm:
                metrics["perf/comm_pct"] = 100 * statistics.fmean(comm)
        peaks = [p.peak_memory_mb for p in parts.values() if p.peak_memory_mb is not None]
        if peaks:
            metrics["perf/peak_memory_mb"] = max(peaks)
        for name in sorted({name for p in parts.values() for name in p.metrics}):
            metrics[name] = reduce_over_ranks(p.metrics[name] for p in parts.values() if name in p.metrics)
        if all(p.spans for p in parts.values()):
            metrics |= self._pipeline_metrics(parts)
        return metrics

    def _pipeline_metrics(self, parts: Mapping[int, TrainPoint]) -> dict[str, float]:
        mesh = self._mesh
        replicas = [[parts[r].spans for r in mesh.pipeline(dp_rank)] for dp_rank in range(mesh.data_parallel_size)]
        if self._theoretical_bubble is None:  # the order of actions is that of the schedule, in every step
            self._theoretical_bubble = theoretical_bubble(replicas[0])
        timeline = Timeline(step=parts[0].step, replicas=replicas, theoretical_bubble=self._theoretical_bubble)
        self.timeline = timeline
        self._bubbles.append(timeline.bubble)
        metrics = {
            "pipeline/bubble_pct": 100 * timeline.bubble,
            "pipeline/bubble_theory_pct": 100 * timeline.theoretical_bubble,
        }
        for stage, share in timeline.stage_busy().items():
            metrics[f"pipeline/stage_{stage}_busy_pct"] = 100 * share
        for part in parts.values():
            for stage in sorted({s.stage for s in part.spans}):
                name = f"pipeline/stage_{stage}_peak_memory_mb"
                if part.peak_memory_mb is not None:
                    metrics[name] = max(part.peak_memory_mb, metrics.get(name, 0.0))
        return metrics


def _eval_metrics(parts: list[EvalPoint]) -> dict[str, float]:
    weight = math.fsum(p.weight for p in parts)
    if weight == 0:
        return {}
    names = {name for p in parts for name in p.sums}
    metrics = {f"val/{name}": math.fsum(p.sums.get(name, 0.0) for p in parts) / weight for name in names}
    return {"val/loss": math.fsum(p.loss_sum for p in parts) / weight, **metrics}


def percentile(values: list[float], share: float) -> float:
    """The value that ``share`` of the values do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]

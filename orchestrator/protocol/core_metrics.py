"""Metrics that every run may have and that the display, the report or the plots refer to.

Their order is the order of the progress line. Other metrics are declared where they are measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from orchestrator.config.eval_splits import VAL, metric_prefix
from orchestrator.protocol.messages import EvalPoint
from orchestrator.protocol.metrics import Column, MetricSpec, Summary, total

LOSS = MetricSpec(
    name="train/loss",
    progress="loss {}",
    summaries=(Summary(key="final_loss", column=Column(heading="loss", position=50, always=True, priority=None)),),
)
"""The mean over the samples of all ranks."""

VAL_LOSS = MetricSpec(
    name="val/loss",
    progress="val_loss {}",
    summaries=(Summary(key="val_loss", column=Column(heading="val loss", position=55, priority=3)),),
)

VAL_ACCURACY = MetricSpec(
    name="val/accuracy",
    progress="val_acc {}",
    summaries=(Summary(key="val_accuracy", column=Column(heading="val acc", position=60, priority=7)),),
)

VAL_PERPLEXITY = MetricSpec(
    name="val/perplexity",
    progress="val_ppl {}",
    summaries=(Summary(key="val_perplexity", column=Column(heading="val ppl", position=62, priority=7)),),
)

VAL_EMA_LOSS = MetricSpec(name="val/ema_loss", summaries=(Summary(key="val_ema_loss"),))
"""The loss of the moving average of the weights."""

SAMPLES_PER_S = MetricSpec(
    name="perf/samples_per_s",
    format="rate",
    progress="{} samples/s",
    summaries=(
        Summary(
            key="samples_per_s",
            derive="harmonic_mean",
            column=Column(heading="samples/s", position=10, always=True, priority=None),
        ),
    ),
)

SAMPLES_PER_S_PER_WORKER = MetricSpec(
    name="perf/samples_per_s_per_worker",
    format="rate",
    summaries=(Summary(key="samples_per_s_per_worker", derive="harmonic_mean"),),
)

STEP_MS = MetricSpec(
    name="perf/step_ms",
    format="{:.1f}",
    summaries=(
        Summary(
            key="step_ms_p50",
            derive="median",
            column=Column(heading="p50 ms", position=20, always=True, priority=6),
        ),
        Summary(
            key="step_ms_p95",
            derive="p95",
            column=Column(heading="p95 ms", position=30, always=True, priority=5),
        ),
    ),
)

TOKENS_PER_S = MetricSpec(
    name="perf/tokens_per_s",
    format="rate",
    summaries=(
        Summary(key="tokens_per_s", derive="harmonic_mean", column=Column(heading="tokens/s", position=12, priority=4)),
    ),
)

FLOPS_PER_SAMPLE = MetricSpec(name="perf/flops_per_sample", summaries=(Summary(key="flops_per_sample"),))

MFU_PCT = MetricSpec(
    name="perf/mfu_pct",
    format="{:.1f}%",
    progress="MFU {}",
    summaries=(Summary(key="mfu_pct", derive="median", column=Column(heading="MFU", position=15, priority=8)),),
)
"""Model FLOPs utilization: the FLOPs of the run per second, as a share of the peak rates of its devices."""

COMM_PCT = MetricSpec(
    name="perf/comm_pct",
    format="{:.0f}%",
    summaries=(Summary(key="comm_pct", derive="median", column=Column(heading="comm", position=42, priority=7)),),
)
"""The share of a step that workers wait for the gradients of other ranks."""

DATA_WAIT_PCT = MetricSpec(
    name="perf/data_wait_pct",
    format="{:.0f}%",
    summaries=(
        Summary(key="data_wait_pct", derive="median", column=Column(heading="data wait", position=44, priority=6)),
    ),
)
"""The share of a step that workers wait for samples."""

EPOCH = MetricSpec(name="train/epoch")

ROWS_PER_S = MetricSpec(
    name="perf/data_rows_per_s",
    reduce="max",
    format="rate",
    summaries=(Summary(key="data_rows_per_s", derive="median"),),
)
"""The samples in each second that the process needs which reads the data for the ranks."""

STORE_MB = MetricSpec(name="perf/data_store_mb", reduce="max", format="{:,.0f}")
"""The blocks of rows that this process keeps in the object store."""

COMPUTE_MS, COMM_MS, DATA_WAIT_MS, IDLE_MS = (
    MetricSpec(name=f"perf/{part}_ms", format="{:.3g}", summaries=(Summary(key=f"{part}_ms", derive="median"),))
    for part in ("compute", "comm", "data_wait", "idle")
)
"""The parts that ``perf/step_ms`` is the sum of: waits for gradients, for samples, for other stages, and the rest.

They are the means over the workers, and 0 where a strategy has no such part, so that strategies can be compared.
"""

PEAK_MEMORY_MB = MetricSpec(
    name="perf/peak_memory_mb",
    reduce="max",
    format="{:,.0f}",
    summaries=(Summary(key="peak_memory_mb", column=Column(heading="peak MB", position=46, priority=5)),),
)
"""The peak memory of the largest worker."""

BUBBLE_THEORY_PCT = MetricSpec(
    name="pipeline/bubble_theory_pct", format="{:.0f}%", summaries=(Summary(key="bubble_theory_pct"),)
)

BUBBLE_PCT = MetricSpec(
    name="pipeline/bubble_pct",
    format="{:.0f}%",
    summaries=(
        Summary(
            key="bubble_pct",
            derive="median",
            column=Column(heading="bubble (theory)", position=40, beside="bubble_theory_pct", priority=9),
        ),
    ),
)

BUSIEST_PCT = MetricSpec(
    name="pipeline/busiest_worker_pct",
    format="{:.0f}%",
    summaries=(Summary(key="busiest_worker_pct", derive="median"),),
)
"""The share of a step that the busiest worker of a pipeline computes: what it lacks is not due to uneven stages."""

SAMPLES_SEEN = MetricSpec(name="train/samples_seen")

CORE_METRICS = (
    LOSS,
    VAL_LOSS,
    VAL_ACCURACY,
    VAL_PERPLEXITY,
    VAL_EMA_LOSS,
    SAMPLES_PER_S,
    SAMPLES_PER_S_PER_WORKER,
    TOKENS_PER_S,
    MFU_PCT,
    STEP_MS,
    COMM_PCT,
    DATA_WAIT_PCT,
    ROWS_PER_S,
    STORE_MB,
    COMPUTE_MS,
    COMM_MS,
    DATA_WAIT_MS,
    IDLE_MS,
    PEAK_MEMORY_MB,
    FLOPS_PER_SAMPLE,
    BUBBLE_THEORY_PCT,
    BUBBLE_PCT,
    BUSIEST_PCT,
    SAMPLES_SEEN,
)


_OF_EVERY_SPLIT = ("loss", "accuracy", "perplexity", "ema_loss")
_LARGEST_EXPONENT = 700.0
"""``math.exp`` raises an error for larger ones than 709."""


def evaluation_metrics(parts: Sequence[EvalPoint]) -> dict[str, float]:
    """Return the metrics of an evaluation by name; ``parts`` are the points of all ranks."""
    metrics = _metrics_of_split(parts, metric_prefix(parts[0].split))
    for others in zip(*(part.others for part in parts), strict=True):
        metrics |= evaluation_metrics(others)
    return metrics


def evaluation_specs(part: EvalPoint) -> list[MetricSpec]:
    """Return the specs of the metrics of an evaluation that no module declares: of splits other than ``val``."""
    splits = [split for point in (part, *part.others) if (split := point.split) != VAL]
    names = [f"{metric_prefix(split)}{metric}" for split in splits for metric in _OF_EVERY_SPLIT]
    return [_spec(name, name.replace("/", "_")) for name in names]


def sums_by_weight(prefix: str, parts: Sequence[tuple[Mapping[str, float], float]]) -> dict[str, float]:
    """Return the job's metrics, from the sums and the weight of each rank; empty if there is no weight."""
    weight = total(weight for _, weight in parts)
    if weight == 0:
        return {}
    names = sorted({name for sums, _ in parts for name in sums})
    return {f"{prefix}{name}": total(sums.get(name, 0.0) for sums, _ in parts) / weight for name in names}


def _metrics_of_split(parts: Sequence[EvalPoint], prefix: str) -> dict[str, float]:
    weight = total(p.weight for p in parts)
    if weight == 0:
        return {}
    metrics = sums_by_weight(prefix, [(p.sums, p.weight) for p in parts])
    loss = total(p.loss_sum for p in parts) / weight
    if parts[0].perplexity:
        metrics[f"{prefix}perplexity"] = math.exp(loss) if loss < _LARGEST_EXPONENT else math.inf
    values = {f"{prefix}{name}": value for p in parts for name, value in (p.values or {}).items()}
    metrics = {f"{prefix}loss": loss, **metrics, **values}
    averaged = [p.ema for p in parts if p.ema is not None]
    return {**metrics, **_metrics_of_split(averaged, f"{prefix}ema_")} if averaged else metrics


def _spec(name: str, key: str) -> MetricSpec:
    return MetricSpec(name=name, progress=f"{key} {{}}", summaries=(Summary(key=key),))

"""What limited the speed of a run, and the key that is most worth trying. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.planning.mesh import recorded_mesh
from orchestrator.planning.schedules import growth, remedy
from orchestrator.protocol.metrics import describe_sharing, summary_value

_WORTH_NAMING_PCT = 10.0
"""Smaller shares of the time are not worth a change."""

_BATCH = "train.global_batch_size"

_HANDOVER_MS = 1.0
"""A loader process needs about so long to hand over a batch: it does not shorten a shorter wait."""


@dataclass(frozen=True, kw_only=True)
class _Loss:
    """``share_pct`` of the time is lost for a reason; ``advice`` is the key that reduces it."""

    share_pct: float
    reason: str
    advice: str


def what_limited(summary: Mapping[str, Any], record: Mapping[str, Any] | None = None) -> str | None:
    """Say in one sentence what limited the speed of a run, and which key is most worth trying.

    Args:
        summary: the summary of the run.
        record: the contents of its ``run.json``, for advice with values; None if they are unknown.

    Returns:
        None if the run was too short to measure it, or its strategy does not measure where the time goes.
    """
    if summary_value(summary, "samples_per_s") is None:
        return None
    settings = _Settings(record or {})
    largest = max(_losses(summary, settings), key=lambda loss: loss.share_pct, default=None)
    if largest is not None and largest.share_pct >= _WORTH_NAMING_PCT:
        return f"limited by {largest.reason}; try {largest.advice}"
    complete = settings.strategy == "single" or not {"comm_pct", "bubble_pct"}.isdisjoint(summary)
    return _computation(summary, settings) if complete else None


class _Settings:
    """The settings of a run, as ``run.json`` has them."""

    def __init__(self, record: Mapping[str, Any]):
        self._params: Mapping[str, Any] = record.get("params") or {}
        self._plan: Mapping[str, Any] = record.get("plan") or {}

    @property
    def strategy(self) -> str | None:
        return self._params.get("strategy.name")

    @property
    def on_gpus(self) -> bool:
        return self._plan.get("device") == "cuda"

    @property
    def loader_processes(self) -> int:
        return int(self._plan.get("loader_processes", 0))

    def get(self, key: str) -> Any:
        return self._params.get(key)

    def times(self, key: str, factor: int = 2) -> str:
        """The override that multiplies ``key``; in words if its value is unknown."""
        value = self.get(key)
        return f"{key}={factor * value}" if isinstance(value, int) else f"a larger {key}"

    def more_microbatches(self) -> str:
        """The override that doubles the micro-batches, or the batch if they are of one sample."""
        pipeline = self._plan.get("pipeline") or {}
        microbatches, batch = pipeline.get("num_microbatches"), self.get(_BATCH)
        if not isinstance(microbatches, int) or not isinstance(batch, int):
            return "a larger strategy.num_microbatches"
        pieces = 2 * microbatches * (self.get("train.grad_accumulation") or 1)
        replicas = recorded_mesh(self._plan.get("mesh") or {}).data_parallel_size
        if batch % (pieces * replicas):
            return self.times(_BATCH)
        return f"strategy.num_microbatches={2 * microbatches}"


def _losses(summary: Mapping[str, Any], settings: _Settings) -> Iterator[_Loss]:
    if (pct := summary_value(summary, "data_wait_pct")) is not None:
        loaders = settings.loader_processes
        wait_ms = pct / 100 * (summary_value(summary, "step_ms_p50") or math.inf)
        loaders_help = loaders > 0 or wait_ms >= _HANDOVER_MS
        advice = f"data.num_workers={2 * max(loaders, 1)}" if loaders_help else settings.times(_BATCH)
        if summary_value(summary, "data_rows_per_s") is not None:  # another process reads, for all ranks
            advice = "more CPUs for the tasks that read the data, or a larger data.batches_ahead"
        yield _Loss(share_pct=pct, reason=f"waiting for samples, {pct:.0f}% of a step", advice=advice)
    if (pct := summary_value(summary, "bubble_pct")) is not None:
        yield _bubble(summary, pct, settings)
    if (pct := summary_value(summary, "comm_pct")) is not None:
        reason = f"waiting for other ranks, {pct:.0f}% of a step"
        yield _Loss(share_pct=pct, reason=reason, advice=_less_communication(settings))
    effective_pct = summary_value(summary, "effective_time_pct")
    if effective_pct is not None and summary.get("restarts"):
        lost_pct = 100 - effective_pct
        spares = settings.get("recovery.spares") or 0
        yield _Loss(
            share_pct=lost_pct,
            reason=f"failures, {lost_pct:.0f}% of the time",
            advice=f"recovery.spares={spares + 1}",
        )


def _bubble(summary: Mapping[str, Any], pct: float, settings: _Settings) -> _Loss:
    reason = f"idle stages, {pct:.0f}% of a step"
    if settings.strategy == "model_parallel":
        return _Loss(share_pct=pct, reason=reason, advice="strategy=pipeline")
    theory_pct = summary_value(summary, "bubble_theory_pct") or 0.0
    reason += f" ({theory_pct:.0f}% in theory)"
    factor = larger_microbatches(
        busiest_pct=summary_value(summary, "busiest_worker_pct") or 100 - pct, theory_pct=theory_pct
    )
    if factor == 1:
        return _Loss(share_pct=pct, reason=reason, advice=settings.more_microbatches())
    advice = remedy(factor, settings.times(_BATCH, factor))
    return _Loss(share_pct=pct, reason=f"{reason}, because its micro-batches are small", advice=advice)


def larger_microbatches(*, busiest_pct: float, theory_pct: float) -> int:
    """Return how many times larger micro-batches should be for messages between stages to be cheap; 1 if they are.

    Args:
        busiest_pct: the share of a step that the busiest worker computes.
        theory_pct: the bubble of the schedule with free messages.

    Returns:
        A power of two.
    """
    if busiest_pct <= 0 or theory_pct >= 100:
        return 1
    return growth(100 / busiest_pct - 100 / (100 - theory_pct))


def _less_communication(settings: _Settings) -> str:
    if settings.strategy == "parameter_server":
        synchronous = settings.get("strategy.consistency") == "sync"
        return "strategy.consistency=async" if synchronous else settings.times("strategy.num_shards")
    if settings.strategy == "ddp" and settings.on_gpus and settings.get("strategy.comm_hook") == "none":
        return "strategy.comm_hook=bf16"
    return settings.times(_BATCH)


def _computation(summary: Mapping[str, Any], settings: _Settings) -> str:
    mfu_pct = summary_value(summary, "mfu_pct")
    text = "limited by computation" + (f" at {mfu_pct:.0f}% MFU" if mfu_pct is not None else "")
    if describe_sharing(summary) is not None:
        return f"{text}, beside other programs"
    if settings.on_gpus and settings.get("train.precision") == "fp32":
        return f"{text}; try train.precision=bf16"
    return f"{text}; try strategy=ddp" if settings.strategy == "single" else text

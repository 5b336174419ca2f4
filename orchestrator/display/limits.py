"""What limited the speed of a run, and the key that is most worth trying. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.protocol.metrics import summary_value

_WORTH_NAMING_PCT = 10.0
"""Smaller shares of the time are not worth a change."""

_FAR_FROM_THEORY_PCT = 15.0
"""A bubble that exceeds its theory by so many points comes from micro-batches that are too small, or uneven stages."""


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

    def get(self, key: str) -> Any:
        return self._params.get(key)

    def doubled(self, key: str) -> str:
        """The override that doubles ``key``; in words if its value is unknown."""
        value = self.get(key)
        return f"{key}={2 * value}" if isinstance(value, int) else f"a larger {key}"

    def more_microbatches(self) -> str:
        """The override that doubles the micro-batches, or the batch if they are of one sample."""
        pipeline = self._plan.get("pipeline") or {}
        microbatches, batch = pipeline.get("num_microbatches"), self.get("train.global_batch_size")
        if not isinstance(microbatches, int) or not isinstance(batch, int):
            return "a larger strategy.num_microbatches"
        pieces = 2 * microbatches * (self.get("train.grad_accumulation") or 1)
        replicas = (self._plan.get("mesh") or {}).get("data_parallel_size", 1)
        if batch % (pieces * replicas):
            return self.doubled("train.global_batch_size")
        return f"strategy.num_microbatches={2 * microbatches}"


def _losses(summary: Mapping[str, Any], settings: _Settings) -> Iterator[_Loss]:
    if (pct := summary_value(summary, "data_wait_pct")) is not None:
        loaders = settings.get("data.num_workers") or 0
        yield _Loss(
            share_pct=pct,
            reason=f"waiting for samples, {pct:.0f}% of a step",
            advice=f"data.num_workers={2 * max(loaders, 1)}",
        )
    if (pct := summary_value(summary, "bubble_pct")) is not None:
        yield _bubble(pct, summary_value(summary, "bubble_theory_pct") or 0.0, settings)
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


def _bubble(pct: float, theory_pct: float, settings: _Settings) -> _Loss:
    reason = f"idle stages, {pct:.0f}% of a step"
    if settings.strategy == "model_parallel":
        return _Loss(share_pct=pct, reason=reason, advice="strategy=pipeline")
    reason += f" ({theory_pct:.0f}% in theory)"
    too_small = pct - theory_pct > _FAR_FROM_THEORY_PCT
    advice = settings.doubled("train.global_batch_size") if too_small else settings.more_microbatches()
    return _Loss(share_pct=pct, reason=reason, advice=advice)


def _less_communication(settings: _Settings) -> str:
    if settings.strategy == "parameter_server":
        synchronous = settings.get("strategy.consistency") == "sync"
        return "strategy.consistency=stale" if synchronous else settings.doubled("strategy.num_shards")
    if settings.strategy == "ddp" and settings.on_gpus and settings.get("strategy.comm_hook") == "none":
        return "strategy.comm_hook=bf16"
    return settings.doubled("train.global_batch_size")


def _computation(summary: Mapping[str, Any], settings: _Settings) -> str:
    mfu_pct = summary_value(summary, "mfu_pct")
    text = "limited by computation" + (f" at {mfu_pct:.0f}% MFU" if mfu_pct is not None else "")
    if settings.on_gpus and settings.get("train.precision") == "fp32":
        return f"{text}; try train.precision=bf16"
    return f"{text}; try strategy=ddp" if settings.strategy == "single" else text

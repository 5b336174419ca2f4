"""The metric of ``checkpoint.best`` over the evaluations of a run, followed by every rank in the same way.

Each rank receives what the others have measured, and so decides alone, and as they do, which evaluation is the best and
whether the run ends early. Ranks exchange nothing at other steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from orchestrator.config.schema import Config
from orchestrator.protocol.events import BestFound
from orchestrator.protocol.messages import EvalPoint
from orchestrator.state.best import BEST, BestSoFar
from orchestrator.state.transport import broadcast_json, gather_json
from orchestrator.worker.control.control import Outbox
from orchestrator.worker.reports.evaluation import metrics_of, value_of


class Improvement:
    """The best evaluation so far. Without ``checkpoint.best``, it follows nothing and exchanges nothing.

    ``saved``: returns the given evaluation or, if its checkpoint could not be saved, the best of those that are.
    """

    def __init__(
        self,
        config: Config,
        *,
        device: torch.device,
        outbox: Outbox,
        saved: Callable[[BestSoFar], BestSoFar] = lambda best: best,
    ):
        self._config = config
        self._device = device
        self._outbox = outbox
        self._saved = saved
        self._history: list[BestSoFar] = []  # after each evaluation, because a run may go back after a failure
        self.restore({})

    @property
    def follows(self) -> bool:
        """Whether the configuration names a metric to follow."""
        return bool(self._history)

    def restore(self, meta: Mapping[str, Any], *, rank: int | None = None) -> None:
        """Continue from the metadata of a checkpoint; empty for a new run. ``rank``: this one, if it is to report."""
        checkpoint = self._config.checkpoint
        if checkpoint.best is None:
            return
        best, new = BestSoFar.from_meta(meta), BestSoFar(metric=checkpoint.best, direction=checkpoint.direction)
        is_same = best is not None and (best.metric, best.direction) == (new.metric, new.direction)
        best = best if best is not None and is_same else new
        self._history = [self._saved(best) if rank == 0 else best]
        self._report(rank)

    def share(self, sources: Sequence[int], *, source_step: int, rank: int) -> None:
        """Continue at ``source_step`` as a survivor can. All ranks call this after a failure or a pause.

        Args:
            sources: for each rank, the rank whose state it received; a survivor is its own source.
            source_step: the step from which the run continues.
            rank: this rank.
        """
        survivor = next((r for r, source in enumerate(sources) if r == source), None)
        if not self._history or survivor is None:
            return
        kept = [best for best in self._history if best.last_step <= source_step] or self._history[:1]
        if len(sources) > 1:
            values = broadcast_json(kept[-1].to_json(), source=survivor, rank=rank, device=self._device)
            kept[-1] = BestSoFar(**values)
        is_other = kept[-1].step != self._history[-1].step
        self._history = kept
        if is_other:
            self._report(rank)

    def add(self, point: EvalPoint, *, rank: int, world_size: int, confirm: Callable[[], None]) -> None:
        """Take note of an evaluation, of which ``point`` is this rank's part. All ranks call this after the same step.

        ``confirm`` is called before what others have sent is used.

        Raises:
            MetricError: the evaluation has no metric of the name in ``checkpoint.best``.
        """
        if not self._history:
            return
        if point.step > self._history[-1].last_step:  # otherwise it is repeated, and may still have to be saved
            self.confine(rank=rank)
        sent = {"point": dataclasses.asdict(point), "best": self._history[-1].to_json()}
        gathered = gather_json(sent, world_size=world_size, device=self._device)
        confirm()
        best = BestSoFar(**gathered[0]["best"])
        value = self._value_of(metrics_of([part["point"] for part in gathered]))
        self._history.append(best.after(point.step, value, min_delta=self._config.train.stop_min_delta))
        if self.is_best(point.step):
            self._report(rank)

    def check(self, metrics: Mapping[str, float]) -> None:
        """Check that a trial of an evaluation, with these ``metrics``, has the one of ``checkpoint.best``.

        Raises:
            MetricError: as :meth:`add`.
        """
        if self._history:
            self._value_of(metrics)

    def confine(self, *, rank: int) -> None:
        """Forget the best evaluation, on rank 0, if its checkpoint could not be saved, for the best of those saved."""
        if rank == 0 and self._history and (best := self._saved(self._history[-1])) != self._history[-1]:
            self._history[-1] = best
            self._report(rank)

    def _value_of(self, metrics: Mapping[str, float]) -> float:
        metric = self._history[-1].metric
        return value_of(metric, metrics, key=f"checkpoint.best={metric}")

    def metadata(self) -> dict[str, Any]:
        """Return the metadata of a checkpoint; empty without ``checkpoint.best``."""
        return {BEST: self._history[-1].to_json()} if self._history else {}

    def is_best(self, step: int) -> bool:
        """Return whether the best evaluation is the one of ``step``."""
        return bool(self._history) and self._history[-1].value is not None and self._history[-1].step == step

    @property
    def why_stop(self) -> str | None:
        """Why the run ends early; None if it goes on."""
        return self._history[-1].why_stop(self._config.train.stop_after) if self._history else None

    def _report(self, rank: int | None) -> None:
        best = self._history[-1]
        if rank == 0 and best.value is not None:
            self._outbox.put_event(BestFound(step=best.step, metric=best.metric, value=best.value))

"""What evaluations change of a run: its best checkpoint, learning rates, fields of the job, and whether it ends early.

Every rank follows them in the same way, and ranks exchange nothing at other steps. What holds is a function of all
evaluations so far, so that after a failure or a resume nothing else has to be kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from orchestrator.config.schema import Config
from orchestrator.job import Job, has_steering
from orchestrator.protocol.events import BestFound
from orchestrator.protocol.messages import EvalPoint
from orchestrator.state.best import BEST, BestSoFar
from orchestrator.state.transport import broadcast_json, gather_json
from orchestrator.strategies.base import Strategy
from orchestrator.user_code.callbacks import Evaluation, Steering
from orchestrator.user_code.steering import EVALUATIONS, asked, evaluations_in, steer
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


class Steered:
    """A job and its strategy, as the evaluations of the run steer them. A job without steering exchanges nothing.

    Rank 0 asks the job, and all ranks do what it says.

    Attributes:
        why_stop: why the job ends the run; None if it goes on.
    """

    def __init__(self, config: Config, job: Job, strategy: Strategy, *, device: torch.device):
        self.why_stop: str | None = None
        self._monitor = config.checkpoint.best or "val/loss"
        self._job = job
        self._strategy = strategy
        self._device = device
        self._evaluations: list[Evaluation] = []
        self._trains = config.evaluate is None

    @property
    def follows(self) -> bool:
        """Whether the job goes on in ways that depend on evaluations."""
        return has_steering(self._job) or self._follows_measured

    def note(self, *, evaluates: bool) -> str | None:
        """Return what the user should know if no evaluation comes before the last step; None otherwise."""
        if evaluates or not self.follows:
            return None
        return (
            "Job.on_evaluation, or a ReduceLROnPlateau, changes nothing in this run, which makes no evaluation before "
            "its last step; set train.eval_every, and let job.dataset('val') return data"
        )

    def restore(self, meta: Mapping[str, Any] | None, *, rank: int, world_size: int) -> None:
        """Continue from the metadata of a checkpoint of this run, or of one that is only evaluated.

        None: from a checkpoint of another run, or from none.
        """
        if self.follows:
            self._evaluations = evaluations_in(meta or {})
            self._decide(rank=rank, world_size=world_size, new_run=meta is None)

    def share(self, sources: Sequence[int], *, source_step: int, rank: int) -> None:
        """Continue at ``source_step`` as a survivor can; see :meth:`Improvement.share`."""
        survivor = next((r for r, source in enumerate(sources) if r == source), None)
        if not self.follows or survivor is None:
            return
        if len(sources) > 1:
            known = [dataclasses.asdict(evaluation) for evaluation in self._evaluations]
            known = broadcast_json(known, source=survivor, rank=rank, device=self._device)
            self._evaluations = [Evaluation(**found) for found in known]
        self._evaluations = [evaluation for evaluation in self._evaluations if evaluation.step <= source_step]
        self._decide(rank=rank, world_size=len(sources))

    def add(self, point: EvalPoint, *, rank: int, world_size: int, confirm: Callable[[], None]) -> None:
        """Do what follows from an evaluation, of which ``point`` is this rank's part; see :meth:`Improvement.add`.

        Raises:
            JobError: the job asks for what cannot be.
            MetricError: the job's scheduler follows a metric that the evaluation lacks.
        """
        if not self.follows:
            return
        parts = gather_json(dataclasses.asdict(point), world_size=world_size, device=self._device)
        confirm()
        before = [evaluation for evaluation in self._evaluations if evaluation.step < point.step]
        self._evaluations = [*before, Evaluation(step=point.step, metrics=metrics_of(parts))]
        self._decide(rank=rank, world_size=world_size)

    def rewind(self, step: int, *, rank: int, world_size: int) -> None:
        """Let what held in ``step`` hold again, if its evaluation is made once more. All ranks call this."""
        before = [evaluation for evaluation in self._evaluations if evaluation.step < step]
        if len(before) < len(self._evaluations):
            self._evaluations = before
            self._decide(rank=rank, world_size=world_size)

    def check(self, metrics: Mapping[str, float]) -> None:
        """Check that a trial of an evaluation, with these ``metrics``, has what the job's scheduler follows.

        Raises:
            MetricError: it does not.
        """
        self._measured([Evaluation(step=0, metrics=metrics)])

    def metadata(self) -> dict[str, Any]:
        """Return the metadata of a checkpoint; empty without steering."""
        return {EVALUATIONS: [dataclasses.asdict(e) for e in self._evaluations]} if self._evaluations else {}

    def _decide(self, *, rank: int, world_size: int, new_run: bool = False) -> None:
        """Let what rank 0 finds in its evaluations hold on all ranks, together with those. A collective operation."""
        found: dict[str, Any] = {}
        if rank == 0:
            steering = asked(self._job, self._evaluations)
            found = {"steering": dataclasses.asdict(steering), EVALUATIONS: self.metadata().get(EVALUATIONS, [])}
        if world_size > 1:
            found = broadcast_json(found, source=0, rank=rank, device=self._device)
            self._strategy.hooks.confirm()
            self._evaluations = [Evaluation(**evaluation) for evaluation in found[EVALUATIONS]]
        steering = Steering(**found["steering"])
        if self._trains:
            self._strategy.steer(steering.lr_factor, self._measured(self._evaluations), new_run=new_run)
        steer(self._job, steering.fields)
        self.why_stop = steering.stop and f"Job.on_evaluation: {steering.stop}"

    def _measured(self, evaluations: Sequence[Evaluation]) -> list[float]:
        """Return what the job's scheduler follows of ``evaluations``; empty if it follows none."""
        if not self._follows_measured:
            return []
        key = f"job.scheduler: its ReduceLROnPlateau follows {self._monitor} (checkpoint.best, or val/loss)"
        return [value_of(self._monitor, evaluation.metrics, key=key) for evaluation in evaluations]

    @property
    def _follows_measured(self) -> bool:
        return self._trains and self._strategy.follows_evaluations


def check_trial(
    point: EvalPoint,
    followers: Iterable[Improvement | Steered],
    *,
    world_size: int,
    device: torch.device,
    confirm: Callable[[], None],
) -> None:
    """Check that evaluations measure what ``followers`` follow, unless the trial is too small to tell.

    A collective operation, if any of them follows something.

    Args:
        point: this rank's part of a trial of an evaluation.
        confirm: called before what others have sent is used.
    """
    if not (checked := [follower for follower in followers if follower.follows]):
        return
    parts = gather_json(dataclasses.asdict(point), world_size=world_size, device=device)
    confirm()
    splits = zip(*((part, *part["others"]) for part in parts), strict=True)
    if all(any(p["weight"] for p in parts) and all(p["values"] is not None for p in parts) for parts in splits):
        for follower in checked:
            follower.check(metrics_of(parts))

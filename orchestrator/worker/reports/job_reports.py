"""What the code of the user is told during training: callbacks, and the model to draw samples from."""

from __future__ import annotations

import dataclasses
import functools
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from orchestrator.config.redact import Redactor
from orchestrator.job import Job
from orchestrator.protocol.events import CheckpointSaved
from orchestrator.protocol.messages import Assignment, EvalPoint
from orchestrator.records.run_dir import RunDir
from orchestrator.state.transport import broadcast_json, gather_json
from orchestrator.strategies.base import StepResult, Strategy
from orchestrator.user_code.callbacks import Callback, Evaluation, RunBegin, RunEnd, SavedCheckpoint, StepEnd
from orchestrator.user_code.errors import JobError
from orchestrator.user_code.results import kind_of
from orchestrator.worker.control.control import Outbox, Warner
from orchestrator.worker.reports.evaluation import ModelChangedError, call_without_effect, error_with_place, metrics_of
from orchestrator.worker.reports.samples import SampleError, Samples


class JobReports:
    """Calls the callbacks of a run, of which the job is the first, and the job's ``sample``.

    An error in them is a warning, and training continues, unless a callback ends the run then.

    Attributes:
        why_stop: why a callback ends the run; None if it goes on.
    """

    def __init__(
        self,
        job: Job,
        callbacks: Sequence[Callback],
        assignment: Assignment,
        *,
        strategy: Strategy,
        device: torch.device,
        outbox: Outbox,
        warner: Warner,
        redactor: Redactor,
    ):
        self.why_stop: str | None = None
        self._callbacks: dict[str, Callback] = {"job": job}
        self._callbacks |= {f"callbacks[{i}]": callback for i, callback in enumerate(callbacks)}
        self._strategy = strategy
        self._device = device
        self._outbox = outbox
        self._warner = warner
        self._run_dir = RunDir(Path(assignment.run_dir), assignment.remote)
        self._samples = Samples(
            job, run_dir=self._run_dir, outbox=outbox, device=device, seed=assignment.config.seed, redactor=redactor
        )
        self.reassign(assignment)

    @property
    def texts(self) -> Mapping[str, str]:
        """The last text of each name that the job has drawn on this rank."""
        return self._samples.texts

    def reassign(self, assignment: Assignment) -> None:
        """Continue with the rank of ``assignment``."""
        self._assignment = assignment

    def run_begins(self, *, step: int) -> None:
        """Tell callbacks that training begins after ``step``, or continues there."""
        assignment = self._assignment
        info = RunBegin(
            step=step,
            steps=assignment.config.train.steps,
            generation=assignment.generation,
            rank=assignment.global_rank,
            world_size=assignment.plan.world_size,
            run_dir=self._run_dir.path,
        )
        self._tell("on_run_begin", info, step=step)

    def step_ended(self, result: StepResult, *, step: int, samples_consumed: int) -> None:
        """Tell callbacks that a step has ended."""
        if not self._called("on_step_end"):
            return
        info = StepEnd(
            step=step,
            steps=self._assignment.config.train.steps,
            samples_seen=samples_consumed,
            loss=result.loss_sum / result.weight,  # a scalar of the host needs no copy
            lr=self._strategy.lr,
            model=self._strategy.full_model,
        )
        self._tell("on_step_end", info, step=step, model=info.model)

    def add(self, point: EvalPoint, *, rank: int, world_size: int, confirm: Callable[[], None]) -> None:
        """Tell callbacks of an evaluation, of which ``point`` is this rank's part; see :meth:`Improvement.add`."""
        on_any_rank = [c for c in self._callbacks.values() if _has_own(c, "on_evaluation_end")]
        if not on_any_rank:
            return
        parts = gather_json(dataclasses.asdict(point), world_size=world_size, device=self._device)
        confirm()
        info = Evaluation(step=point.step, metrics=metrics_of(parts))
        reasons = self._tell("on_evaluation_end", info, step=point.step)
        if any(callback.may_stop for callback in on_any_rank):
            if world_size > 1:
                reasons = broadcast_json(reasons, source=0, rank=rank, device=self._device)
                confirm()
            self.why_stop = next((f"{name}: {reason}" for name, reason in reasons.items()), None)

    def checkpoint_saved(self, event: CheckpointSaved) -> None:
        """Tell callbacks of a checkpoint."""
        self._tell("on_checkpoint_saved", SavedCheckpoint(step=event.step, path=event.path), step=event.step)

    def run_ended(self, info: RunEnd) -> None:
        """Tell callbacks that the run ends."""
        self._tell("on_run_end", info, step=info.step)

    def _called(self, method: str) -> Mapping[str, Callback]:
        """Return the callbacks that have the method and belong on this rank, by name."""
        is_first = self._assignment.global_rank == 0
        return {n: c for n, c in self._callbacks.items() if _has_own(c, method) and (c.every_rank or is_first)}

    def _tell(self, method: str, info: Any, *, step: int, model: nn.Module | None = None) -> dict[str, Any]:
        """Call a method of the callbacks. Return what is not None of what it returns, by their names.

        Raises:
            JobError: one has failed that ends the run then.
            ModelChangedError: one has changed the model.
        """
        answers: dict[str, Any] = {}
        for name, callback in self._called(method).items():
            title, call = f"{name}.{method}", getattr(callback, method)
            try:
                with self._outbox.within("callback"):
                    answer = call_without_effect(
                        functools.partial(call, info), method=title, model=model, device=self._device
                    )
                if method == "on_evaluation_end" and answer is not None:
                    answers[name] = _reason(answer, callback)
            except ModelChangedError:
                raise
            except Exception as e:
                text = f"{title} {e}" if isinstance(e, JobError) else f"{title} raised {error_with_place(e)}"
                if callback.errors_end_run:
                    traceback.print_exc()
                    raise JobError(text) from e
                self._warner.warn_of_call(text, method=title, step=step)
        return answers

    def sample(self, *, step: int) -> None:
        """Let the job sample from the model, on the rank that has all of it, or gathers its shards.

        All ranks call this at the same step.

        Raises:
            ModelChangedError: the job has changed the model.
        """
        model, weights = self._strategy.full_model, None
        self._outbox.enter(step, "sample")
        if self._strategy.divides_model:
            weights = self._strategy.gather_model()
            self._strategy.confirm()
        if model is None and weights is None:
            return
        try:
            self._samples.take(model, weights, step=step)
        except ModelChangedError:
            raise
        except Exception as e:
            text = str(e) if isinstance(e, SampleError) else f"job.sample raised {error_with_place(e)}"
            self._warner.warn_of_call(text, method="job.sample", step=step)


def _has_own(callback: Callback, method: str) -> bool:
    return getattr(type(callback), method) is not getattr(Callback, method)


def _reason(answer: Any, callback: Callback) -> str:
    """Return why a callback ends the run.

    Raises:
        JobError: it may not, or does not say it.
    """
    if not callback.may_stop:
        raise JobError(f"returns {kind_of(answer)}; return None, or let the class say may_stop = True")
    if not isinstance(answer, str) or not answer:
        raise JobError(f"returns {kind_of(answer)}; return why the run ends, as a text, or None")
    return answer

"""What the job is shown during training: the end of each step, and the model to draw samples from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from orchestrator.config.redact import Redactor
from orchestrator.job import Job, StepEnd
from orchestrator.protocol.messages import Assignment
from orchestrator.records.run_dir import RunDir
from orchestrator.strategies.base import StepResult, Strategy
from orchestrator.worker.control.control import Outbox
from orchestrator.worker.control.warner import Warner
from orchestrator.worker.reports.job_calls import ModelChangedError, call_without_effect, error_with_place
from orchestrator.worker.reports.samples import SampleError, Samples


class JobReports:
    """Calls the job's ``on_step_end`` and ``sample``. An error in them is a warning, and training continues."""

    def __init__(
        self,
        job: Job,
        assignment: Assignment,
        *,
        strategy: Strategy,
        device: torch.device,
        outbox: Outbox,
        warner: Warner,
        redactor: Redactor,
    ):
        self._job = job
        self._strategy = strategy
        self._device = device
        self._outbox = outbox
        self._warner = warner
        self._samples = Samples(
            job,
            run_dir=RunDir(Path(assignment.run_dir), assignment.remote),
            outbox=outbox,
            device=device,
            seed=assignment.config.seed,
            redactor=redactor,
        )
        self.reassign(assignment)

    @property
    def texts(self) -> Mapping[str, str]:
        """The last text of each name that the job has drawn on this rank."""
        return self._samples.texts

    def reassign(self, assignment: Assignment) -> None:
        """Continue with the rank of ``assignment``."""
        self._assignment = assignment

    def step_ended(self, result: StepResult, *, step: int, samples_consumed: int) -> None:
        """Tell the job on rank 0 that a step has ended.

        Raises:
            ModelChangedError: the job has changed the model.
        """
        if self._assignment.global_rank != 0 or type(self._job).on_step_end is Job.on_step_end:
            return
        info = StepEnd(
            step=step,
            steps=self._assignment.config.train.steps,
            samples_seen=samples_consumed,
            loss=result.loss_sum / result.weight,  # a scalar of the host needs no copy
            lr=self._strategy.lr,
            model=self._strategy.full_model,
        )
        with self._outbox.within("callback"):
            try:
                call_without_effect(
                    lambda: self._job.on_step_end(info), method="on_step_end", model=info.model, device=self._device
                )
            except ModelChangedError:
                raise
            except Exception as e:
                self._warner.warn_of_job(
                    f"job.on_step_end raised {error_with_place(e)}", method="on_step_end", step=step
                )

    def sample(self, *, step: int) -> None:
        """Let the job sample from the model, on the rank that has all of it, or gathers its parts.

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
            self._warner.warn_of_job(text, method="sample", step=step)

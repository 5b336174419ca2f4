"""The Ray actor of a worker whose training is a script of the user, in a process of its own.

It imports no torch unless it has a GPU, so that a script starts sooner, and its worker takes little memory.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
import traceback
from pathlib import Path
from typing import Any

import ray

from orchestrator.features.scripts.script_run import ScriptRun
from orchestrator.job import Job
from orchestrator.protocol.messages import Assignment, Failure, Outcome, Stacks
from orchestrator.records.rank_log import log_tail
from orchestrator.records.run_dir import RunDir
from orchestrator.strategies.external.job import Script
from orchestrator.user_code.errors import JobError, error_text
from orchestrator.worker.base_actor import BaseWorker
from orchestrator.worker.process import network
from orchestrator.worker.process.output import all_stacks, print_error
from orchestrator.worker.process.shared_directory import NotSharedError

_EXPLAINED = (JobError, NotSharedError)
"""Errors whose text says what the user has to change."""


class ScriptWorker(BaseWorker):
    """A worker that runs the script of its rank, which passes on the output of the script itself."""

    shows_output = False

    def __init__(self, label: str, **options: Any):
        super().__init__(label, **options)
        self.script: ScriptRun | None = None

    @ray.method(concurrency_group="control")
    def stacks(self) -> Stacks:
        """Return what the threads of the script are doing, which this ends; before its start, those of this process."""
        return all_stacks(self.training_thread, flight=None) if self.script is None else self.script.stacks()

    def _run(self, assignment: Assignment, job: Job, startup: dict[str, float]) -> Outcome:
        """Run the script of the user, whose ranks form their process group themselves."""
        assert isinstance(job, Script)
        network.choose_for(assignment, node_ip=ray.util.get_node_ip_address())
        self.script = ScriptRun(assignment, job, gate=self.gate, outbox=self.outbox)
        outcome = self.script.run(startup)
        if outcome.status == "done" and self.guard is not None:  # what the script has left running goes on
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.guard, signal.SIGTERM)
        return outcome

    def _failed(self, error: BaseException, assignment: Assignment) -> Outcome:
        explained = isinstance(error, _EXPLAINED)
        if not explained:
            print_error()
        failure = Failure(
            message=str(error) if explained else error_text(error),
            traceback="" if explained else "".join(traceback.format_exception(error)),
            time=time.time(),
            collateral=isinstance(error, ConnectionError),
            log_tail=log_tail(RunDir(Path(assignment.run_dir), assignment.remote).log_file(assignment.global_rank)),
            final=explained,
        )
        return Outcome(
            status="failed",
            step=0 if self.script is None else self.script.step,
            failure=self.redactor.data(failure, by_key=False),
        )

"""A run of ``debug=true``: its only rank trains in this thread, and another thread follows it as a driver does.

There is one generation. Nothing looks for hangs, because a debugger may hold the rank.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
import time
import uuid
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from orchestrator.display.terminal import native_warnings_dropped
from orchestrator.driver.code.worker_code import worker_variables
from orchestrator.driver.gang.members import Member, Members, WorkerMethod
from orchestrator.driver.process.run_context import RunContext, RunResult
from orchestrator.driver.process.uploads import Uploader
from orchestrator.driver.reporting import RecordUpload
from orchestrator.driver.run.run_recorder import RunRecorder, SavedCheckpoints
from orchestrator.driver.run.verdicts import Verdicts
from orchestrator.driver.run.worker_reports import WorkerReports, record_ranks
from orchestrator.planning.plan import Plan
from orchestrator.policy.failure import Outcomes
from orchestrator.policy.run_state import GenerationEnd, Verdict
from orchestrator.policy.worker_gpus import with_common_precision
from orchestrator.protocol.events import GenerationStarted, StopRequested
from orchestrator.protocol.messages import Assignment, Heartbeat, Place, WorkerEnvironment, WorkerInfo, merged
from orchestrator.strategies import registry
from orchestrator.user_code.breakpoints import REFUSAL, VARIABLE
from orchestrator.worker.base_actor import BaseWorker
from orchestrator.worker.debug_worker import NODE, DebugWorker, InThisProcess

GENERATION = 1


class OwnGang(Members):
    """The gang of one worker, which is an object of this process."""

    def __init__(self, worker: InThisProcess, info: WorkerInfo):
        super().__init__()
        self.members = (Member(global_rank=0, actor=None, info=info, slot=0),)
        self._worker = worker

    def heartbeats(
        self, *, with_system_metrics: bool, wait_s: float, ranks: Collection[int] | None = None
    ) -> dict[int, Heartbeat]:
        last = self._last_heartbeats.pop(0, None)
        now: Heartbeat = self.call(BaseWorker.heartbeat, with_system_metrics)
        return merged((0, h) for h in (last, now) if h is not None)

    def poll(self, method: WorkerMethod, *args: Any, **_: Any) -> dict[int, Any]:
        return {0: self.call(method, *args)}

    def call(self, method: WorkerMethod, *args: Any) -> Any:
        """Call a method of the worker, which Ray's decorator has made one of an actor for the types."""
        return getattr(self._worker, method.__name__)(*args)


class OwnWorkers:
    """See :class:`~orchestrator.driver.run.run_workers.AnyWorkers`."""

    def __init__(self, plan: Plan, gang: OwnGang):
        self.plan = plan
        self.gang = gang
        self.waits_s: Mapping[str, float] = {"queue_s": 0.0, "waited_s": 0.0}

    def name_of(self, rank: int) -> str:
        return self.plan.display_name(rank)

    def refill(self) -> None:
        pass


class DebugRun:
    """Executes one run in this process."""

    def __init__(self, context: RunContext, uploader: Uploader, records: RecordUpload):
        spec = context.spec
        self.spec = spec
        self._context = context
        self._events = context.events
        self._stop = context.stop
        plan, config = spec.sizes.initial, spec.config
        variables = worker_variables(config.cluster.env, os.environ)
        values = {k: v for k, v in variables.values.items() if (k, v) != (VARIABLE, REFUSAL)}
        rules = registry.load(plan.strategy)
        self._worker = (rules.worker(debug=True) or DebugWorker)(
            heartbeat_timeout_s=config.cluster.heartbeat_timeout_s, variables=replace(variables, values=values)
        )
        self._info = self._worker.info(on_gpu=plan.device == "cuda")
        train = with_common_precision(config.train, [self._info], refused=rules.refused_precisions)
        self._config = replace(config, train=train)
        self._workers = OwnWorkers(plan, OwnGang(self._worker, self._info))
        self._recorder = RunRecorder(context, self._workers)
        self._checkpoints = SavedCheckpoints(context)
        self._reports = WorkerReports(
            context,
            self._workers,
            self._recorder,
            self._checkpoints,
            uploader=uploader,
            records=records,
            node_id=NODE,
        )
        self._verdicts = Verdicts(context, self._workers, self._recorder, self._checkpoints, self._reports)

    def execute(self) -> RunResult:
        """Train until the run finishes, is stopped or fails.

        Raises:
            KeyboardInterrupt, SystemExit: see :class:`StopSignals`.
        """
        self._recorder.begin()
        with contextlib.ExitStack() as at_end:
            at_end.callback(shutil.rmtree, self.spec.run_dir.spools, ignore_errors=True)
            at_end.enter_context(self._worker)
            at_end.enter_context(self._stop.raising())
            self._recorder.enter("running", precision=self._config.train.precision)
            record_ranks(
                self.spec.run_dir,
                self._workers.plan,
                self._workers.gang.members,
                tokens_per_sample=self.spec.tokens_per_sample,
            )
            verdict = self._verdict(self._train(self._assignment()))
            result = self._verdicts.result(verdict)
        return result

    def _assignment(self) -> Assignment:
        spec, plan = self.spec, self._workers.plan
        backend: Literal["gloo", "nccl"] = "gloo" if self._info.gpu_uuid is None else "nccl"
        self._events.emit(
            GenerationStarted(
                generation=GENERATION,
                backend=backend,
                device="cpu" if backend == "gloo" else "cuda",
                precision=self._config.train.precision,
                workers=(f"{self._info.hostname} pid {self._info.pid}, which is this process",),
            )
        )
        fence = f"{uuid.uuid4().hex} generation {GENERATION}"
        self._context.lease.admit(fence)
        with native_warnings_dropped():  # torch warns of an address without a name
            timeout_s = self._config.cluster.rendezvous_timeout_s
            host, port = self._workers.gang.call(BaseWorker.open_store, timeout_s, True)
        return Assignment(
            generation=GENERATION,
            global_rank=0,
            store_host=host,
            store_port=port,
            backend=backend,
            run_dir=str(spec.run_dir.path),
            remote=spec.run_dir.remote,
            run_uid=spec.run_uid,
            environment=WorkerEnvironment(
                working_dir=str(Path.cwd()), import_paths=(), config=self._config, pickled_job=spec.pickled_job
            ),
            plan=plan,
            fence=fence,
            checkpoint=None if self._checkpoints.newest is None else str(self._checkpoints.newest),
            checkpoint_remote=self._checkpoints.remote,
            places=(Place(0, self._info.gpu_index),),
        )

    def _train(self, assignment: Assignment) -> GenerationEnd:
        """Train in this thread, and collect the reports in another one meanwhile."""
        ended = threading.Event()
        follower = threading.Thread(target=self._follow, args=(ended,), name="follower", daemon=True)
        follower.start()
        try:
            outcome = self._worker.train(assignment.packed(), 0)
        finally:
            ended.set()
            follower.join()
        outcomes = Outcomes(1)
        outcomes.add(0, outcome)
        if outcome.last_heartbeat is not None:
            self._workers.gang.add_last_heartbeat(0, outcome.last_heartbeat)
            self._reports.handle(self._reports.telemetry.collect(self._workers.gang).events)
        if self._worker.was_left:
            self._stop.request(signal.SIGINT, "`q` in the debugger, or Ctrl-C")
        if outcomes.all_ended("done"):
            self._recorder.end_transition(GENERATION, time.time())
        asked: Literal["stopped"] | None = None if self._stop.received is None else "stopped"
        stopped_ago_s = None if asked is None else self._stop.seconds_ago
        return GenerationEnd(outcomes=outcomes, last_step=outcome.step, asked=asked, stopped_ago_s=stopped_ago_s)

    def _follow(self, ended: threading.Event) -> None:
        """Collect the reports of the worker until it has ended, and let it stop if that is asked for."""
        every_s, gang, asked = self._config.cluster.heartbeat_s, self._workers.gang, False
        while not ended.wait(every_s):
            self._reports.handle(self._reports.telemetry.collect(gang).events)
            if self._stop.received is not None and not asked:
                asked = True
                self._events.emit(StopRequested(signal=self._stop.cause))
                gang.call(BaseWorker.finish_step, GENERATION, gang.call(BaseWorker.hold, GENERATION), True)

    def _verdict(self, end: GenerationEnd) -> Verdict:
        if (rank := end.outcomes.first_failed) is not None:
            return self._verdicts.failed(end, rank, "")
        if end.outcomes.all_ended("done"):
            return self._verdicts.completed(end)
        self._reports.finish_workers(end.outcomes)
        return self._verdicts.stopped(None if self._worker.was_left else end)

"""The Ray actor of a worker that trains: one thread trains while others answer the driver."""

from __future__ import annotations

import bdb
import copy
import functools
import os
import time
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist

from orchestrator.compat import deferred_dynamo
from orchestrator.compat.backends import flight_record
from orchestrator.job import Job
from orchestrator.protocol import messages
from orchestrator.records.run_dir import RunDir
from orchestrator.strategies import registry
from orchestrator.worker import failures
from orchestrator.worker.base_actor import BaseWorker
from orchestrator.worker.control import rendezvous
from orchestrator.worker.control.control import inject_fault
from orchestrator.worker.control.rendezvous import Teardown, context_of
from orchestrator.worker.loop import Loop
from orchestrator.worker.process.output import all_stacks, flight_record_of, print_error
from orchestrator.worker.process.process_memory import free_unreachable, set_allocator

DISCARD_TIMEOUT_S = 1.0
"""How long a rebuild waits for the checkpoint that the discarded loop is writing, which may end later."""


class Worker(BaseWorker):
    """A worker that trains a job in the loop of this project."""

    def __init__(self, label: str, *, heartbeat_timeout_s: float, **options: Any):
        super().__init__(label, heartbeat_timeout_s=heartbeat_timeout_s, **options)
        deferred_dynamo.install()  # before any strategy is imported
        self.store: dist.TCPStore | None = None  # has to live as long as the process group
        self.teardown = Teardown(word_timeout_s=heartbeat_timeout_s)
        self.device = torch.device("cpu")
        self.loop: Loop | None = None
        self.joined: tuple[int, int] | None = None  # when the NCCL groups of this generation were formed, of how many

    @ray.method(concurrency_group="control")
    def abort(self, generation: int) -> None:
        self.teardown.abort(generation)

    @ray.method(concurrency_group="control")
    def stacks(self) -> messages.Stacks:
        return all_stacks(self.training_thread, flight=self._flight_record())

    @ray.method(concurrency_group="control")
    def finish(self, timeout_s: float) -> messages.PendingCheckpoint | None:
        return None if self.loop is None else self.loop.finish(timeout_s)

    def _begin(self, assignment: messages.Assignment, startup: dict[str, float]) -> Job:
        self.teardown.begin(assignment.generation, backend=assignment.backend)
        return super()._begin(assignment, startup)

    def _leave(self, *, clean: bool) -> None:
        self.teardown.start(functools.partial(_close, self.loop), clean=clean)

    def _run(self, assignment: messages.Assignment, job: Job, startup: dict[str, float]) -> messages.Outcome:
        """Form the process group of a generation, and train in it."""
        self._set_up_thread(assignment)
        if assignment.sources is None:
            self._discard_loop()
        elif self.loop is not None:
            self.loop.reassign(assignment)  # before anything can fail, so that a failure reports the new ranks
        store = self._join(assignment, startup)
        if self.loop is None:
            self.loop = self._make_loop(assignment, job)
        wait_for_others = functools.partial(rendezvous.wait_until_built, assignment, store, self.gate)
        return self.loop.run(startup, wait_for_others=wait_for_others, store=store)

    def _failed(self, error: BaseException, assignment: messages.Assignment) -> messages.Outcome:
        if not isinstance(error, (*failures.EXPLAINED, bdb.BdbQuit)):
            print_error()
        log = RunDir(Path(assignment.run_dir), assignment.remote).log_file(assignment.global_rank)
        failure = failures.describe_failure(error, assignment, self.loop, log, after_abort=self.teardown.has_aborted)
        return messages.Outcome(
            status="failed",
            step=failures.last_step(error, failure, self.loop),
            failure=self.redactor.data(failure, by_key=False),
            recoverable_steps=_recoverable_steps(self.loop),
        )

    def _set_up(self, environment: messages.WorkerEnvironment) -> None:
        config = environment.config
        set_allocator(gathers=config.strategy.gathers)
        if config.train.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        super()._set_up(environment)
        registry.load(config.strategy.name)

    def _set_up_thread(self, assignment: messages.Assignment) -> None:
        """Set what torch keeps for each thread. This runs in the training thread."""
        torch.set_num_threads(assignment.plan.threads_per_worker)
        if assignment.backend == "nccl":
            self.device = torch.device("cuda", 0)
            torch.cuda.set_device(self.device)

    def _join(self, assignment: messages.Assignment, startup: dict[str, float]) -> dist.TCPStore:
        """Form the process group of a generation. Return its store."""
        began = time.perf_counter()
        rank = assignment.global_rank
        step = 0 if self.loop is None else self.loop.position.step
        self.outbox.enter(step, "join")
        inject_fault(assignment.faults, rank=rank, phase="join", step=step)
        store = rendezvous.join(assignment, store=self.own_store if rank == 0 else None, gate=self.gate)
        self.store = store
        self.outbox.enter(step, "connect")
        inject_fault(assignment.faults, rank=rank, phase="connect", step=step)
        self.joined = (time.time_ns(), assignment.plan.world_size) if assignment.backend == "nccl" else None
        rendezvous.connect(assignment, store, node_ip=self._node()[1], device=self.device)
        self.gate.check(assignment.generation)  # an abort before this has found no groups
        startup["rendezvous_s"] = time.perf_counter() - began
        return store

    def _flight_record(self) -> messages.FlightRecord | None:
        """Return what this rank has enqueued with NCCL; None with gloo, or if torch's record cannot be read."""
        if self.joined is None:
            return None
        since_ns, world_size = self.joined
        return flight_record_of(lambda: flight_record(dist.group.WORLD), since_ns=since_ns, world_size=world_size)

    def _discard_loop(self) -> None:
        """Free the obsolete model and end its threads now, because two models may not fit into memory."""
        if self.loop is not None:
            self.loop.discard(DISCARD_TIMEOUT_S)
            self.loop = None
            free_unreachable(self.device)

    def _make_loop(self, assignment: messages.Assignment, job: Job) -> Loop:
        name = assignment.config.strategy.name
        job = copy.copy(job)  # evaluations may change its fields, and another loop may begin anew
        return Loop(
            assignment=assignment,
            job=job,
            strategy=registry.load(name).create(context_of(assignment, self.device), job),
            device=self.device,
            gate=self.gate,
            outbox=self.outbox,
            redactor=self.redactor,
            callbacks=self.callbacks,
        )


def remote_worker(strategy: str) -> Any:
    """Return the actor class for the workers of a strategy, wrapped for Ray."""
    worker = registry.load(strategy).worker(debug=False) or Worker
    return ray.remote(concurrency_groups={"control": 2})(worker)  # type: ignore[call-overload]


def _close(loop: Loop | None) -> None:
    """Release what refers to the process groups of the generation."""
    if loop is not None:
        loop.strategy.close()


def _recoverable_steps(loop: Loop | None) -> messages.RecoverableSteps:
    """Return what this process can provide after an error; nothing if the strategy cannot say."""
    try:
        return {} if loop is None else loop.recoverable_steps()
    except Exception:
        print_error()
        return {}

"""The Ray actor of a worker: one thread trains while others answer the driver."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import socket
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO, cast

import ray
import torch
import torch.distributed as dist

from orchestrator.compat import deferred_dynamo
from orchestrator.compat.process_groups import flight_record
from orchestrator.compat.ray.process import keep_process_title
from orchestrator.config.callback_loader import load_callbacks
from orchestrator.config.job_loader import load_job
from orchestrator.config.redact import RedactingStream, Redactor
from orchestrator.job import Job
from orchestrator.protocol.flight import enqueued_in
from orchestrator.protocol.messages import (
    SHOW_ALL_GPUS,
    Assignment,
    FlightRecord,
    Heartbeat,
    Outcome,
    PendingCheckpoint,
    RecoverableSteps,
    Stacks,
    Variables,
    WorkerEnvironment,
    WorkerInfo,
)
from orchestrator.records import staged
from orchestrator.records.run_dir import RunDir
from orchestrator.strategies import registry
from orchestrator.strategies.external.job import Script
from orchestrator.strategies.sharded.options import ShardedConfig
from orchestrator.user_code.callbacks import Callback
from orchestrator.user_code.exits import exits_refused, readable
from orchestrator.worker import failures
from orchestrator.worker.control import rendezvous
from orchestrator.worker.control.context import context_of
from orchestrator.worker.control.control import Outbox, StepGate
from orchestrator.worker.control.fault_injection import inject_fault
from orchestrator.worker.control.spool import Spool
from orchestrator.worker.control.teardown import Teardown
from orchestrator.worker.loop import Loop
from orchestrator.worker.measure.gpu_meter import GpuMeter
from orchestrator.worker.measure.metrics import CpuMeter, system_metrics
from orchestrator.worker.process import allocator, connections, memory, packages
from orchestrator.worker.process.gpu import gpu_error, has_bf16
from orchestrator.worker.process.output import Output
from orchestrator.worker.process.preemption import TerminationNotice
from orchestrator.worker.process.shared_directory import check_shared
from orchestrator.worker.process.stacks import all_stacks, is_waiting
from orchestrator.worker.script.run import ScriptRun

DISCARD_TIMEOUT_S = 1.0
"""How long a rebuild waits for the checkpoint that the discarded loop is writing, which may end later."""
SHARED_TIMEOUT_S = 10.0
"""How long the run directory may take to appear on a node."""


class Worker:
    """A process that owns one GPU, or a share of the CPUs.

    Methods in the concurrency group ``control`` answer while :meth:`train` runs.

    Args:
        label: how Ray names the actor.
        heartbeat_timeout_s: how long a step waits for a decision of the driver that holds it, and with NCCL a rank that
            has failed for the driver's word.
        variables: the environment variables to set, before CUDA, NCCL and the job read them.
        requirements: what pip installs first, unless this node has it.
        install_timeout_s: how long that may take.

    Raises:
        InstallError: pip has failed.
    """

    def __init__(
        self,
        label: str,
        *,
        heartbeat_timeout_s: float,
        variables: Variables,
        requirements: Sequence[str],
        install_timeout_s: float,
    ):
        os.environ.update({**variables.defaults, **os.environ, **variables.values})
        self.label = label  # which Ray reads if the following fails
        packages.use(requirements, timeout_s=install_timeout_s)
        deferred_dynamo.install()  # before any strategy is imported
        self.redactor = Redactor.of_process()
        self.own_store: dist.TCPStore | None = None
        self.store: dist.TCPStore | None = None  # has to live as long as the process group
        self.output = Output(lambda stream: cast(TextIO, RedactingStream(stream, self.redactor)))
        self.outbox = Outbox(self.redactor)
        self.gate = StepGate(timeout_s=heartbeat_timeout_s)
        self.teardown = Teardown(word_timeout_s=heartbeat_timeout_s)
        self.device = torch.device("cpu")
        self.cpu = CpuMeter()
        self.gpus = GpuMeter()
        self.notice = TerminationNotice()
        self.job: Job | None = None
        self.callbacks: list[Callback] = []
        self.loop: Loop | None = None
        self.script: ScriptRun | None = None
        self.log: Path | None = None
        self.training_thread: int | None = None
        self.joined: tuple[int, int] | None = None  # when the NCCL groups of this generation were formed, of how many

    def __repr__(self) -> str:
        return self.label

    @ray.method(concurrency_group="control")
    def worker_info(self) -> WorkerInfo:
        """Return on which node and GPU this worker runs."""
        return _worker_info()

    @ray.method(concurrency_group="control")
    def open_store(self, timeout_s: float, on_one_node: bool) -> tuple[str, int]:
        """Open the store of a generation in this process. Return its host and port.

        ``on_one_node``: no rank is on another node.
        """
        host = rendezvous.LOOPBACK if on_one_node else ray.util.get_node_ip_address()
        self.own_store = rendezvous.open_store(host, timeout_s=timeout_s)
        return host, self.own_store.port

    @ray.method(concurrency_group="control", enable_task_events=False)
    def heartbeat(self, with_system_metrics: bool) -> Heartbeat:
        """Return the progress since the last heartbeat, and if asked for, the system metrics of the node.

        Ray keeps no record of these calls, which would displace the records of all others.
        """
        system = system_metrics(self.cpu, self.gpus) if with_system_metrics else {}
        waiting = is_waiting(self.training_thread)
        return self.outbox.collect(system, leaving=self.notice.received(), waiting=waiting)

    @ray.method(concurrency_group="control")
    def hold(self, generation: int) -> int:
        """See :meth:`StepGate.hold`."""
        return self.gate.hold(generation)

    @ray.method(concurrency_group="control")
    def finish_step(self, generation: int, step: int, save: bool) -> None:
        """See :meth:`StepGate.finish_step`."""
        self.gate.finish_step(generation, step, save)

    @ray.method(concurrency_group="control")
    def open_gate(self, generation: int) -> None:
        """See :meth:`StepGate.open`."""
        self.gate.open(generation)

    @ray.method(concurrency_group="control")
    def abandon(self, generation: int, unreachable: tuple[str, ...]) -> None:
        """End ``generation``, and shut down connections to the ``unreachable`` IP addresses of lost nodes."""
        self.gate.abandon(generation)
        if unreachable:
            connections.shut_down(unreachable)

    @ray.method(concurrency_group="control")
    def abort(self, generation: int) -> None:
        """Abort what waits in the process groups of ``generation``, which all ranks know to have ended."""
        self.teardown.abort(generation)

    @ray.method(concurrency_group="control")
    def stacks(self) -> Stacks:
        """Return what the threads of this process are doing, or those of its script, which this ends."""
        if self.script is not None:
            return self.script.stacks()
        return all_stacks(self.training_thread, flight=self._flight_record())

    @ray.method(concurrency_group="control")
    def finish(self, timeout_s: float) -> PendingCheckpoint | None:
        """Finish the background work. Return the checkpoint that is still being written after ``timeout_s``."""
        return None if self.loop is None else self.loop.finish(timeout_s)

    def prepare(self, environment: WorkerEnvironment) -> WorkerInfo:
        """Load everything that does not depend on the rank, so that a spare can replace a worker without delay.

        Never raises. :meth:`train` tries again, and reports the failure if it persists.
        """
        try:
            self._set_up(environment)
            registry.load(environment.config.strategy.name)
        except BaseException:
            print(self.redactor.text(traceback.format_exc()), file=sys.stderr)
        return _worker_info()

    def train(self, packed: bytes, global_rank: int) -> Outcome:
        """Train one rank's part of a generation. The outcome reports a failure, before the process groups are released.

        The process keeps its model and its position in the data, with which the next generation continues.

        Args:
            packed: the assignment, packed, which is the same for all workers but for their ranks.
            global_rank: the rank of this worker.

        Raises:
            Exception: the assignment cannot be read, because this node has another version of a class in it.
        """
        assignment = Assignment.unpacked(packed, global_rank=global_rank)
        self.outbox.begin_generation()
        self.training_thread = threading.get_ident()
        startup: dict[str, float] = {}
        clean = False
        try:
            with exits_refused():
                job = self._begin(assignment, startup)
                if isinstance(job, Script):
                    outcome = self._run_script(assignment, job, startup)
                else:
                    outcome = self._run_loop(assignment, job, startup)
            clean = True
        except BaseException as e:
            outcome = self._failed(readable(e), assignment)
        finally:
            self.teardown.start(functools.partial(_close, self.loop), clean=clean)
        return replace(outcome, last_heartbeat=self.outbox.collect_last())

    def _begin(self, assignment: Assignment, startup: dict[str, float]) -> Job:
        """Prepare this process for a generation; returns the job."""
        keep_process_title(f"rank-{assignment.global_rank} {assignment.plan.run_name}")
        self.teardown.begin(assignment.generation, backend=assignment.backend)
        self._open_run_dir(assignment)
        if self.job is None:
            began = time.perf_counter()
            self._set_up(assignment.environment)
            startup["job_s"] = time.perf_counter() - began
        assert self.job is not None
        return self.job

    def _run_loop(self, assignment: Assignment, job: Job, startup: dict[str, float]) -> Outcome:
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

    def _run_script(self, assignment: Assignment, job: Script, startup: dict[str, float]) -> Outcome:
        """Run the script of the user, whose ranks form their process group themselves."""
        rendezvous.choose_interfaces(assignment, node_ip=ray.util.get_node_ip_address())
        self.script = ScriptRun(assignment, job, gate=self.gate, outbox=self.outbox)
        return self.script.run(startup)

    def _open_run_dir(self, assignment: Assignment) -> None:
        """Find or create the run directory, and write this rank's output there."""
        run_dir = RunDir(Path(assignment.run_dir), assignment.remote)
        if run_dir.remote is None:
            check_shared(
                run_dir, assignment.run_uid, output_dir=assignment.config.output_dir, timeout_s=SHARED_TIMEOUT_S
            )
        else:
            staged.enter(run_dir)
        if (log := run_dir.log_file(assignment.global_rank)) != self.log:
            self.output.redirect(log)
            self.log = log
            with contextlib.suppress(OSError):  # without a spool, unreceived reports are lost if the process dies
                node_id = ray.get_runtime_context().get_node_id()
                self.outbox.keep_in(Spool(run_dir.spool(node_id, os.getpid())))

    def _failed(self, error: BaseException, assignment: Assignment) -> Outcome:
        """Return the outcome of a generation that ``error`` has ended, which is being handled."""
        if not isinstance(error, failures.EXPLAINED):
            traceback.print_exc()
        log = RunDir(Path(assignment.run_dir), assignment.remote).log_file(assignment.global_rank)
        failure = failures.describe_failure(error, assignment, self.loop, log, after_abort=self.teardown.has_aborted)
        return Outcome(
            status="failed",
            step=failures.last_step(error, failure, self.loop) if self.script is None else self.script.step,
            failure=self.redactor.data(failure, by_key=False),
            recoverable_steps=_recoverable_steps(self.loop),
        )

    def _set_up(self, environment: WorkerEnvironment) -> None:
        """Set up what lasts as long as the process, and load the job."""
        config = environment.config
        self.redactor.learn(config)
        allocator.set_allocator(gathers=isinstance(config.strategy, ShardedConfig))
        if config.train.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        if environment.working_dir is not None and Path(environment.working_dir).is_dir():
            os.chdir(environment.working_dir)
        sys.path.extend(p for p in environment.import_paths if p not in sys.path)
        errors: list[str] = []
        # The pickle refers to modules that the working directory and the paths above make importable.
        given = None if environment.pickled_job is None else ray.cloudpickle.loads(environment.pickled_job)
        if given is not None:
            self.redactor.learn(given)
        job = given if given is not None else load_job(config.job, errors, self.redactor)
        self.callbacks = load_callbacks(config.callbacks, errors, self.redactor)
        if job is None or errors:
            raise ValueError("\n".join(errors))
        self.job = job

    def _set_up_thread(self, assignment: Assignment) -> None:
        """Set what torch keeps for each thread. This runs in the training thread."""
        torch.set_num_threads(assignment.plan.threads_per_worker)
        if assignment.backend == "nccl":
            self.device = torch.device("cuda", 0)
            torch.cuda.set_device(self.device)

    def _join(self, assignment: Assignment, startup: dict[str, float]) -> dist.TCPStore:
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
        rendezvous.connect(assignment, store, node_ip=ray.util.get_node_ip_address(), device=self.device)
        self.gate.check(assignment.generation)  # an abort before this has found no groups
        startup["rendezvous_s"] = time.perf_counter() - began
        return store

    def _flight_record(self) -> FlightRecord | None:
        """Return what this rank has enqueued with NCCL; None with gloo, or if torch's record cannot be read."""
        if self.joined is None:
            return None
        since_ns, world_size = self.joined
        try:
            dump = flight_record(dist.group.WORLD)
            return FlightRecord(
                enqueued=enqueued_in(dump, since_ns=since_ns, world_size=world_size),
                dump=zlib.compress(dump.encode(), level=1),
            )
        except Exception:  # its format may change with torch
            traceback.print_exc()
            return None

    def _discard_loop(self) -> None:
        """Free the obsolete model and end its threads now, because two models may not fit into memory."""
        if self.loop is not None:
            self.loop.discard(DISCARD_TIMEOUT_S)
            self.loop = None
            memory.free_unreachable(self.device)

    def _make_loop(self, assignment: Assignment, job: Job) -> Loop:
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


def remote_worker() -> Any:
    """Return the actor class, wrapped for Ray."""
    return ray.remote(concurrency_groups={"control": 2})(Worker)  # type: ignore[call-overload]


def _worker_info() -> WorkerInfo:
    context = ray.get_runtime_context()
    gpus = context.get_accelerator_ids().get("GPU", [])
    error = gpu_error(gpus)
    usable = bool(gpus) and error is None
    return WorkerInfo(
        node_id=context.get_node_id(),
        node_ip=ray.util.get_node_ip_address(),
        hostname=socket.gethostname(),
        pid=os.getpid(),
        gpu_index=int(gpus[0]) if usable and gpus[0].isdigit() else None,
        gpu_uuid=str(torch.cuda.get_device_properties(0).uuid) if usable else None,
        gpu_error=error,
        has_bf16=usable and has_bf16(len(gpus)),
        sees_all_gpus=os.environ.get(SHOW_ALL_GPUS, "").lower() in ("1", "true"),
    )


def _close(loop: Loop | None) -> None:
    """Release what refers to the process groups of the generation."""
    if loop is not None:
        loop.strategy.close()


def _recoverable_steps(loop: Loop | None) -> RecoverableSteps:
    """Return what this process can provide after an error; nothing if the strategy cannot say."""
    try:
        return {} if loop is None else loop.recoverable_steps()
    except Exception:
        traceback.print_exc()
        return {}

"""What the actor of every worker does: it answers the driver, and runs its part of one generation after another.

Imports no torch, which takes seconds of CPU time: see ``features/scripts``.
"""

from __future__ import annotations

import abc
import contextlib
import faulthandler
import functools
import os
import signal
import socket
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, TextIO, cast

import ray

from orchestrator.compat.ray.side_effects import keep_process_title
from orchestrator.config.job_loader import load_callbacks, load_job
from orchestrator.config.redact import RedactingStream, Redactor
from orchestrator.job import Job
from orchestrator.protocol import messages
from orchestrator.records.output_dir import prepare_staging
from orchestrator.records.run_dir import RunDir
from orchestrator.user_code.breakpoints import held_at
from orchestrator.user_code.callbacks import Callback
from orchestrator.user_code.errors import exits_refused, readable
from orchestrator.worker.control.control import Outbox, StepGate
from orchestrator.worker.control.spool import Spool
from orchestrator.worker.measure.meters import CpuMeter, GpuMeter, system_metrics
from orchestrator.worker.process import family, network, pip_packages
from orchestrator.worker.process.network import LOOPBACK
from orchestrator.worker.process.output import Output, RankOutput, all_stacks, is_waiting, training_frame
from orchestrator.worker.process.shared_directory import check_shared

if TYPE_CHECKING:
    from torch.distributed import TCPStore

SHARED_TIMEOUT_S = 10.0
"""How long the run directory may take to appear on a node."""


class BaseWorker(abc.ABC):
    """A process that owns one GPU, or a share of the CPUs.

    Methods in the concurrency group ``control`` answer while :meth:`train` runs.

    Attributes:
        shows_output: whether the console shows what rank 0 prints.
        is_first: whether this process is rank 0.

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

    shows_output: ClassVar[bool] = True

    def __init__(
        self,
        label: str,
        *,
        heartbeat_timeout_s: float,
        variables: messages.Variables,
        requirements: Sequence[str],
        install_timeout_s: float,
    ):
        os.environ.update({**variables.defaults, **os.environ, **variables.values})
        self.label = label  # which Ray reads if the following fails
        mark = f"{os.getpid()}-{uuid.uuid4().hex}"
        self.guard = family.guard(os.getpid(), f"{family.MARK}={mark}")
        os.environ[family.MARK] = mark
        pip_packages.use(requirements, timeout_s=install_timeout_s)
        self.redactor = Redactor.of_process()
        self.output = self._output()
        self.outbox = Outbox(self.redactor)
        self.gate = StepGate(timeout_s=heartbeat_timeout_s)
        self.cpu = CpuMeter()
        self.gpus = GpuMeter()
        self.notice = self._notice()
        self.own_store: TCPStore | None = None
        self.job: Job | None = None
        self.callbacks: Sequence[Callback] = ()
        self.log: Path | None = None
        self.training_thread: int | None = None
        self.is_first = False

    def __repr__(self) -> str:
        return self.label

    def _output(self) -> Output:
        """Return what writes the output of this process to the log of its rank."""
        return RankOutput(lambda stream: cast(TextIO, RedactingStream(stream, self.redactor)))

    def _notice(self) -> Notice:
        """Return what catches the signal by which this process is asked to leave."""
        return TerminationNotice()

    def _node(self) -> tuple[str, str]:
        """Return the id and the IP address of the node."""
        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()

    def _name_process(self, title: str) -> None:
        """Give this process a title for ``ps`` and the dashboard."""
        keep_process_title(title)

    @ray.method(concurrency_group="control")
    def worker_info(self) -> messages.WorkerInfo:
        """Return on which node and GPU this worker runs."""
        return _worker_info()

    @ray.method(concurrency_group="control")
    def open_store(self, timeout_s: float, on_one_node: bool) -> tuple[str, int]:
        """Open the store of a generation in this process. Return its host and port.

        ``on_one_node``: no rank is on another node.
        """
        from orchestrator.worker.control import rendezvous  # with torch

        host = LOOPBACK if on_one_node else ray.util.get_node_ip_address()
        self.own_store = rendezvous.open_store(host, timeout_s=timeout_s)
        return host, self.own_store.port

    @ray.method(concurrency_group="control", enable_task_events=False)
    def heartbeat(self, with_system_metrics: bool) -> messages.Heartbeat:
        """Return the progress since the last heartbeat, and if asked for, the system metrics of the node.

        Ray keeps no record of these calls, which would displace the records of all others.
        """
        system = system_metrics(self.cpu, self.gpus) if with_system_metrics else {}
        self._show_output()
        frame = training_frame(self.training_thread)
        leaving, waiting = self.notice.received(), is_waiting(frame)
        return self.outbox.collect(system, leaving=leaving, waiting=waiting, held_at=held_at(frame))

    @ray.method(concurrency_group="control")
    def hold(self, generation: int) -> messages.Reached:
        """See :meth:`StepGate.hold`."""
        return self.gate.hold(generation)

    @ray.method(concurrency_group="control")
    def finish_step(self, generation: int, last: int | messages.Reached, save: bool) -> None:
        """See :meth:`StepGate.finish_step`."""
        self.gate.finish_step(generation, last, save)

    @ray.method(concurrency_group="control")
    def open_gate(self, generation: int) -> None:
        """See :meth:`StepGate.open`."""
        self.gate.open(generation)

    @ray.method(concurrency_group="control")
    def abandon(self, generation: int, unreachable: tuple[str, ...]) -> None:
        """End ``generation``, and shut down connections to the ``unreachable`` IP addresses of lost nodes."""
        self.gate.abandon(generation)
        if unreachable:
            network.shut_down_connections(unreachable)

    @ray.method(concurrency_group="control")  # noqa: B027 - not abstract, because a process may have no groups
    def abort(self, generation: int) -> None:
        """Abort what waits in the process groups of ``generation``, which all ranks know to have ended."""

    @ray.method(concurrency_group="control")
    def stacks(self) -> messages.Stacks:
        """Return what the threads of this process are doing."""
        return all_stacks(self.training_thread, flight=None)

    @ray.method(concurrency_group="control")
    def finish(self, timeout_s: float) -> messages.PendingCheckpoint | None:
        """Finish the background work. Return the checkpoint that is still being written after ``timeout_s``."""
        return None

    def prepare(self, environment: messages.WorkerEnvironment) -> messages.WorkerInfo:
        """Load everything that does not depend on the rank, so that a spare can replace a worker without delay.

        Never raises. :meth:`train` tries again, and reports the failure if it persists.
        """
        try:
            self._set_up(environment)
        except BaseException:
            print(self.redactor.text(traceback.format_exc()), file=sys.stderr)
        return _worker_info()

    def train(self, packed: bytes, global_rank: int) -> messages.Outcome:
        """Train one rank's part of a generation. The outcome reports a failure, before anything is released.

        The process keeps its state, with which the next generation continues.

        Args:
            packed: the assignment, packed, which is the same for all workers but for their ranks.
            global_rank: the rank of this worker.

        Raises:
            Exception: the assignment cannot be read, because this node has another version of a class in it.
        """
        assignment = messages.Assignment.unpacked(packed, global_rank=global_rank)
        self.outbox.begin_generation()
        self.training_thread = threading.get_ident()
        self.is_first = global_rank == 0
        startup: dict[str, float] = {}
        clean = False
        try:
            with exits_refused():
                outcome = self._run(assignment, self._begin(assignment, startup), startup)
            clean = True
        except BaseException as e:
            outcome = self._failed(readable(e), assignment)
        finally:
            self._leave(clean=clean)
        self._show_output(final=True)
        return replace(outcome, last_heartbeat=self.outbox.collect_last())

    def _show_output(self, *, final: bool = False) -> None:
        """Let the console show what rank 0 has printed; the other ranks mostly print the same."""
        if self.shows_output and self.is_first:
            lines, left_out = self.output.shown_lines(final=final)
            self.outbox.put_lines(lines, left_out=left_out)

    @abc.abstractmethod
    def _run(self, assignment: messages.Assignment, job: Job, startup: dict[str, float]) -> messages.Outcome:
        """Train in a generation; ``startup``: the duration of each part of the start, in seconds."""

    @abc.abstractmethod
    def _failed(self, error: BaseException, assignment: messages.Assignment) -> messages.Outcome:
        """Return the outcome of a generation that ``error`` has ended, which is being handled."""

    def _leave(self, *, clean: bool) -> None:  # noqa: B027 - not abstract, because there may be nothing to release
        """Release what belongs to a generation; ``clean``: whether it has ended in order on this rank."""

    def _begin(self, assignment: messages.Assignment, startup: dict[str, float]) -> Job:
        """Prepare this process for a generation; returns the job."""
        self._name_process(f"rank-{assignment.global_rank} {assignment.plan.run_name}")
        self._open_run_dir(assignment)
        if self.job is None:
            began = time.perf_counter()
            self._set_up(assignment.environment)
            startup["job_s"] = time.perf_counter() - began
        assert self.job is not None
        return self.job

    def _open_run_dir(self, assignment: messages.Assignment) -> None:
        """Find or create the run directory, and write this rank's output there."""
        run_dir = RunDir(Path(assignment.run_dir), assignment.remote)
        if run_dir.remote is None:
            check_shared(
                run_dir, assignment.run_uid, output_dir=assignment.config.output_dir, timeout_s=SHARED_TIMEOUT_S
            )
        else:
            prepare_staging(run_dir)
        if (log := run_dir.log_file(assignment.global_rank)) != self.log:
            self.output.redirect(log)
            self.log = log
            self.outbox.log = run_dir.location_of(log)
            with contextlib.suppress(OSError):  # without a spool, unreceived reports are lost if the process dies
                self.outbox.keep_in(Spool(run_dir.spool(self._node()[0], os.getpid())))

    def _set_up(self, environment: messages.WorkerEnvironment) -> None:
        """Set up what lasts as long as the process, and load the job and the callbacks."""
        self.redactor.learn(environment.config)
        errors: list[str] = []
        self.job = job_of(environment, self.redactor)
        self.callbacks = load_callbacks(environment.config.callbacks, errors, self.redactor)
        if errors:
            raise ValueError("\n".join(errors))


def job_of(environment: messages.WorkerEnvironment, redactor: Redactor) -> Job:
    """Return the job, which this process can import from now on. Changes the working directory.

    Raises:
        ValueError: it cannot be loaded.
    """
    if environment.working_dir is not None and Path(environment.working_dir).is_dir():
        os.chdir(environment.working_dir)
    sys.path.extend(p for p in environment.import_paths if p not in sys.path)
    errors: list[str] = []
    # The pickle refers to modules that the working directory and the paths above make importable.
    if environment.pickled_job is not None:
        given: Job = ray.cloudpickle.loads(environment.pickled_job)
        redactor.learn(given)
        return given
    job = load_job(environment.config.job, errors, redactor)
    if job is None or errors:
        raise ValueError("\n".join(errors))
    return job


def _worker_info() -> messages.WorkerInfo:
    context = ray.get_runtime_context()
    info = messages.WorkerInfo(
        node_id=context.get_node_id(),
        node_ip=ray.util.get_node_ip_address(),
        hostname=socket.gethostname(),
        pid=os.getpid(),
        sees_all_gpus=os.environ.get(messages.SHOW_ALL_GPUS, "").lower() in ("1", "true"),
    )
    if not (gpus := context.get_accelerator_ids().get("GPU", [])):
        return info
    from orchestrator.worker.process.gpu import with_gpus

    return with_gpus(info, gpus)


class Notice:
    """Stands for a process that nothing asks to leave: the driver looks after its signals itself."""

    def received(self) -> bool:
        """Return whether this process has received SIGTERM."""
        return False


class TerminationNotice(Notice):
    """Catches SIGTERM in this process and remembers it.

    Python runs its signal handlers in the main thread, which never leaves Ray's C++ loop. The handler of
    ``faulthandler`` runs in C: the stack that it writes into a pipe is the notice.
    """

    def __init__(self) -> None:
        self._received = False
        self._reading, self._writing = os.pipe()
        for end in (self._reading, self._writing):
            os.set_blocking(end, False)  # a full pipe must not block the handler
        faulthandler.register(signal.SIGTERM, file=self._writing, all_threads=False, chain=False)
        # A forked process has to end on SIGTERM, as multiprocessing expects.
        os.register_at_fork(after_in_child=functools.partial(faulthandler.unregister, signal.SIGTERM))

    def received(self) -> bool:
        if not self._received:
            with contextlib.suppress(BlockingIOError):
                self._received = bool(os.read(self._reading, 1))
        return self._received

"""The messages between driver and workers: assignments down, progress and outcomes up."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from orchestrator.config.eval_splits import VAL
from orchestrator.config.schema import Config
from orchestrator.planning.faults import Fault
from orchestrator.planning.plan import Plan
from orchestrator.protocol.events import Event
from orchestrator.protocol.flight import Enqueued
from orchestrator.protocol.metrics import MachineUse, Metric
from orchestrator.storage.remote import Remote
from orchestrator.timeline import Span

ANY_RANK = -1
"""Key for all ranks, if they have equal state."""

PENDING = -2
"""Key for a step whose update a worker has not made, but can make if another worker has made its own."""

RecoverableSteps = Mapping[int, tuple[int, ...]]
"""For each rank whose state a worker holds, or for :data:`ANY_RANK`, the steps after which it holds that state.

It also holds the state after a step under :data:`PENDING`, once another worker has completed that step.
"""

Phase = Literal[
    "start", "join", "connect", "build", "train", "eval", "sample", "checkpoint", "callback", "compile", "end"
]
"""What a worker does. In ``sample`` and ``callback`` it runs code of the job that may take any time."""


SHOW_ALL_GPUS = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
"""The environment variable by which Ray hides no GPU of the node from a worker."""


@dataclass(frozen=True, kw_only=True)
class WorkerInfo:
    """The node, process and GPU of a worker.

    Attributes:
        gpu_index: counts the GPUs of the node; None without a usable GPU.
        gpu_error: which of the GPUs that Ray has given to the worker torch cannot use, and why; None if it can use
            all, or has none.
        has_bf16: whether it has GPUs, and all of them compute in bfloat16.
        sees_all_gpus: whether ``SHOW_ALL_GPUS`` is set.
    """

    node_id: str
    node_ip: str
    hostname: str
    pid: int
    gpu_index: int | None = None
    gpu_uuid: str | None = None
    gpu_error: str | None = None
    has_bf16: bool = False
    sees_all_gpus: bool = False

    @property
    def place(self) -> str:
        """The node as shown to users: ``host (address)``."""
        return f"{self.hostname} ({self.node_ip})"


@dataclass(frozen=True)
class Place:
    """Where a rank is: the number of its node, in the order of ranks, and its GPU there; None without a usable GPU."""

    node: int
    gpu: int | None


@dataclass(frozen=True, order=True)
class Reached:
    """How far a rank is in its work: all ranks come to the same places, in this order.

    Attributes:
        step: the training step.
        section: counts what follows the step, such as a pass over the data of an evaluation; 0 in the step itself.
        batch: the batch of the section; 0 before the first.
    """

    step: int = 0
    section: int = 0
    batch: int = 0


@dataclass(frozen=True, kw_only=True)
class Variables:
    """Environment variables: a process sets ``values``, and ``defaults`` where it has no value of its own."""

    values: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class WorkerEnvironment:
    """What is the same for every worker of a run.

    Workers take over ``working_dir`` and ``import_paths`` of the driver, so that the user's job can be imported and its
    relative paths are valid there.

    Attributes:
        working_dir: None if Ray starts the workers in a copy of it.
        pickled_job: the job itself, in the format of cloudpickle, if its class cannot be imported from the name in
            ``config``: a notebook or a script defines it, or the caller made the instance. None otherwise.
    """

    working_dir: str | None
    import_paths: tuple[str, ...]
    config: Config
    pickled_job: bytes | None = None


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """The driver's assignment for one worker in one generation.

    Attributes:
        store_host: host of the rendezvous store, with ``store_port``.
        run_dir: the path of the run directory, which every node has of its own if there is a ``remote``.
        remote: the run directory on an object store; None if ``run_dir`` is shared.
        fence: the token that the run directory's fence file holds as long as this generation may save.
        sources: for each rank, the rank that has its state after ``source_step``; None to start from ``checkpoint``.
        checkpoint: the path of the checkpoint to start from; None, without ``sources``, for a new training.
        checkpoint_remote: the directory on a store that it has to be fetched from; None if it is on disk.
        places: the place of each rank.
        failures: how many failures have ended earlier generations.
        tracked_as: the id of the run on the tracking server, for a script that logs there; None if there is none.
    """

    generation: int
    global_rank: int
    store_host: str
    store_port: int
    backend: Literal["gloo", "nccl"]
    run_dir: str
    run_uid: str
    environment: WorkerEnvironment
    plan: Plan
    remote: Remote | None = None
    fence: str = ""
    sources: tuple[int, ...] | None = None
    source_step: int = 0
    checkpoint: str | None = None
    checkpoint_remote: Remote | None = None
    faults: tuple[Fault, ...] = ()
    places: tuple[Place, ...] = ()
    failures: int = 0
    tracked_as: str | None = None

    @property
    def config(self) -> Config:
        return self.environment.config

    def packed(self) -> bytes:
        """Return this assignment as bytes, small enough for Ray to send them inside of a call."""
        return zlib.compress(pickle.dumps(self), level=1)

    @classmethod
    def unpacked(cls, data: bytes, *, global_rank: int) -> Assignment:
        """Return the assignment that :meth:`packed` has packed, for another rank."""
        packed: Assignment = pickle.loads(zlib.decompress(data))
        return replace(packed, global_rank=global_rank)


@dataclass(frozen=True, kw_only=True)
class TrainPoint:
    """One rank's part of a logged point, over the steps since the last one.

    Attributes:
        time: wall-clock seconds since the epoch.
        loss_sum: this rank's part of the loss; the loss of the run is the sum of it over the sum of ``weight``.
        weight: see ``loss_sum``.
        step_ms: the time of each step after warm-up, without evaluation and checkpoints.
        data_wait_ms: the mean time that a step waited for its batch.
        comm_share: the share of the last step, 0 to 1, that this rank waited for other ranks; None if unknown.
        peak_memory_mb: the peak memory of this rank so far; None if unknown.
        spans: what the stages of this rank did in the last step; empty during warm-up.
        step_weight: this rank's weight in the last step.
        sums: this rank's part of the job's metrics in the last step; the run's value is the sum of it over the sum of
            ``step_weight``.
        metrics: the other metrics by name.
        flops: the floating-point operations of this rank in a step; None if unknown.
        flops_at_peak_ms: how long the device of this rank takes for ``flops`` at its peak rate; None if unknown.
        machine: the use of the machine since the last reading, after warm-up; None if this point has no reading.
        samples: what this rank has trained on since its last point, if a script reports it; None otherwise.
        num_steps: the steps since the last point, if ``step_ms`` has not the time of each; None if it has.
    """

    step: int
    time: float
    loss_sum: float
    weight: float
    step_ms: tuple[float, ...]
    data_wait_ms: float
    comm_share: float | None
    peak_memory_mb: float | None = None
    spans: tuple[Span, ...] = ()
    step_weight: float = 0.0
    sums: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    flops: float | None = None
    flops_at_peak_ms: float | None = None
    machine: MachineUse | None = None
    samples: float | None = None
    num_steps: int | None = None


@dataclass(frozen=True, kw_only=True)
class EvalPoint:
    """One rank's part of an evaluation: sums over its samples of a ``split``.

    Attributes:
        sums: by the name of the job's metric.
        values: the metrics of all ranks' samples that are no sums, on the rank that has computed them; None if they
            cannot be computed of the few samples of a trial.
        ema: the same with the moving average of the weights; None without ``train.ema_decay``.
        others: the same for the other splits of ``train.eval_splits``.
    """

    step: int
    time: float
    loss_sum: float
    weight: float
    sums: Mapping[str, float]
    perplexity: bool = False
    values: Mapping[str, float] | None = field(default_factory=dict)
    ema: EvalPoint | None = None
    split: str = VAL
    others: tuple[EvalPoint, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """A worker's answer to the driver: its progress, and what happened since the last heartbeat.

    Attributes:
        ticks: batches that the worker has trained on or evaluated.
        evaluated: the batches of the present evaluation that are done, and all of them; None without an evaluation, and
            for a number that is unknown.
        usual_tick_s: the usual time of one of them in this phase; None if it is unknown, or if the next batch may take
            longer because it is the first of a data loader.
        waiting: whether the training thread waits for other ranks.
        busy_ms: the mean time of recent steps, without the time spent waiting for other ranks; None if unknown.
        first_report: the number of reports that the driver has received from this process before.
        system: system metrics of the node, if the driver asked for them.
        leaving: whether the process has received SIGTERM.
        held_at: where a debugger holds the training thread, as ``file.py:34``; None if none does.
        lines: what a script has printed, for the console.
    """

    step: int
    phase: Phase
    ticks: int = 0
    evaluated: tuple[int, int | None] | None = None
    usual_tick_s: float | None = None
    waiting: bool = False
    busy_ms: float | None = None
    first_report: int = 0
    points: tuple[TrainPoint | EvalPoint, ...] = ()
    events: tuple[Event, ...] = ()
    system: Mapping[str, float] = field(default_factory=dict)
    leaving: bool = False
    held_at: str | None = None
    lines: tuple[str, ...] = ()

    def after(self, earlier: Heartbeat | None) -> Heartbeat:
        """Return this heartbeat with the reports, lines and system metrics of an ``earlier``, undelivered one added."""
        if earlier is None:
            return self
        return replace(
            self,
            first_report=earlier.first_report,
            points=(*earlier.points, *self.points),
            events=(*earlier.events, *self.events),
            system={**earlier.system, **self.system},
            lines=(*earlier.lines, *self.lines),
        )


def merged(heartbeats: Iterable[tuple[int, Heartbeat]]) -> dict[int, Heartbeat]:
    """Return one heartbeat of each rank, with the reports of all those given for it, in order."""
    by_rank: dict[int, Heartbeat] = {}
    for rank, heartbeat in sorted(heartbeats, key=lambda item: item[1].first_report):
        by_rank[rank] = heartbeat.after(by_rank.get(rank))
    return by_rank


@dataclass(frozen=True, kw_only=True)
class PendingCheckpoint:
    """A checkpoint that a worker is still writing. ``progress`` grows as long as bytes are being written."""

    step: int
    progress: int


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a worker failed.

    Attributes:
        collateral: the failure is a broken connection, most likely caused by the failure of another rank; the worker
            itself can continue.
        final: a retry would fail in the same way.
        own_frames: the part of the traceback that is of the user's files, or else of a library; empty if it has none.
    """

    message: str
    traceback: str
    time: float
    collateral: bool
    log_tail: str
    final: bool = False
    own_frames: str = ""


@dataclass(frozen=True, kw_only=True)
class FlightRecord:
    """What a rank has enqueued; ``dump`` is the JSON of torch's flight recorder, compressed with zlib."""

    enqueued: Enqueued
    dump: bytes


@dataclass(frozen=True, kw_only=True)
class Stacks:
    """What a worker does that makes no progress.

    Attributes:
        text: the stacks of all its Python threads.
        waiting: whether its training thread waits for other ranks.
        flight: what it has enqueued with NCCL, or a script with any backend; None if that is not known.
    """

    text: str
    waiting: bool
    flight: FlightRecord | None = None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a generation ended for a worker.

    Attributes:
        texts: the last sample of each name that is a text, if this rank draws samples.
        failure: why it has failed; of a script that was asked to stop, why it may not have saved what it was to save.
        recoverable_steps: the states that this worker holds.
        ended_early: why the worker is done before the last step of the run; None if it has reached the last step.
        last_heartbeat: what it had not reported before; None if the worker has not begun the generation, or has died.
    """

    status: Literal["done", "stopped", "failed"]
    step: int
    texts: Mapping[str, str] = field(default_factory=dict)
    failure: Failure | None = None
    recoverable_steps: RecoverableSteps = field(default_factory=dict)
    ended_early: str | None = None
    last_heartbeat: Heartbeat | None = None

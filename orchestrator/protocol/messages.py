"""What travels between driver and workers: orders down, progress and outcomes up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from orchestrator.config.schema import Config
from orchestrator.planning.faults import Fault
from orchestrator.planning.plan import Plan
from orchestrator.protocol.events import Event
from orchestrator.protocol.metrics import Metric
from orchestrator.timeline.spans import Span

Phase = Literal["start", "join", "build", "train", "eval", "checkpoint", "end"]


@dataclass(frozen=True, kw_only=True)
class WorkerInfo:
    """Where a worker landed. ``gpu_index`` is its GPU's number on the node, ``gpu_uuid`` the device's own."""

    node_id: str
    node_ip: str
    hostname: str
    pid: int
    gpu_index: int | None = None
    gpu_uuid: str | None = None


@dataclass(frozen=True, kw_only=True)
class WorkerEnvironment:
    """What holds for every worker of a run, whatever its rank.

    ``working_dir`` and ``import_paths``: where the driver stands and finds modules, so that the
    user's job and its relative paths mean the same there.
    """

    working_dir: str
    import_paths: tuple[str, ...]
    config: Config


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """Orders for one worker in one generation.

    Training goes on from the state after ``source_step``, which each rank gets from the one that ``sources`` names
    for it; or else from ``checkpoint``; or it begins. ``fence``: what stands in the run directory's fence as long as
    this generation may save. ``faults``: those to rehearse.
    """

    generation: int
    global_rank: int
    local_rank: int
    store_host: str
    store_port: int
    backend: Literal["gloo", "nccl"]
    run_dir: str
    run_uid: str
    environment: WorkerEnvironment
    plan: Plan
    fence: str = ""
    sources: tuple[int, ...] | None = None
    source_step: int = 0
    checkpoint: str | None = None
    faults: tuple[Fault, ...] = ()

    @property
    def config(self) -> Config:
        return self.environment.config


@dataclass(frozen=True, kw_only=True)
class TrainPoint:
    """One rank's part of a logged point, over the steps since the last one.

    ``time`` is wall-clock seconds. ``loss_sum`` and ``weight`` are this rank's share: the loss of
    the run is the sum of the one over the sum of the other. ``step_ms`` has the steps after warm-up
    only, without evaluation and checkpoints; ``comm_share`` is the part of step ``step``'s own time,
    0 to 1, that it waited for other ranks; ``spans`` is what the stages of this rank did in it, after
    warm-up only. ``peak_memory_mb`` is the most that this rank has held so far.
    """

    step: int
    time: float
    samples_seen: int
    epoch: float
    loss_sum: float
    weight: float
    lr: float
    grad_norm: float | None
    step_ms: tuple[float, ...]
    data_wait_ms: float
    comm_share: float | None
    peak_memory_mb: float | None = None
    spans: tuple[Span, ...] = ()
    metrics: Mapping[str, Metric] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class EvalPoint:
    """One rank's part of an evaluation: sums over its samples."""

    step: int
    time: float
    loss_sum: float
    weight: float
    sums: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """A worker's answer to the driver: where it stands, and what happened since the last one.

    ``ticks`` counts the batches that it has trained on or evaluated, ``usual_tick_s`` is what one takes. ``leaving``:
    its process has been asked to end (SIGTERM).
    """

    step: int
    phase: Phase
    ticks: int = 0
    usual_tick_s: float | None = None
    busy_ms: float | None = None
    points: tuple[TrainPoint | EvalPoint, ...] = ()
    events: tuple[Event, ...] = ()
    system: Mapping[str, float] = field(default_factory=dict)
    leaving: bool = False

    def after(self, earlier: Heartbeat | None) -> Heartbeat:
        """This one, with what an ``earlier`` one had to tell."""
        if earlier is None:
            return self
        return replace(
            self,
            points=(*earlier.points, *self.points),
            events=(*earlier.events, *self.events),
            system={**earlier.system, **self.system},
        )


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a worker's part ended. ``collateral``: a broken connection, most likely another rank's fault; the worker can
    go on. ``final``: trying again would end the same.
    """

    message: str
    traceback: str
    time: float
    collateral: bool
    log_tail: str
    final: bool = False


@dataclass(frozen=True, kw_only=True)
class Stacks:
    """What every Python thread of a worker is doing. ``waiting``: its training thread waits for other ranks."""

    text: str
    waiting: bool


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a worker's part in a generation ended.

    ``recoverable_steps``: of which ranks the worker still has the state, and after which steps.
    """

    status: Literal["done", "stopped", "failed"]
    step: int
    text: str | None = None
    failure: Failure | None = None
    recoverable_steps: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

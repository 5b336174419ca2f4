"""The events of a run. One stream of them feeds the journal and the console; MLflow is fed from the journal."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from orchestrator.protocol.metrics import MetricSpec


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened in a run; ``time`` is in seconds since the epoch."""

    time: float = field(default_factory=time.time)

    @property
    def kind(self) -> str:
        """The class name in snake case, which ``events.jsonl`` has as ``event``."""
        return re.sub(r"(?<!^)(?=[A-Z])", "_", type(self).__name__).lower()


@dataclass(frozen=True, kw_only=True)
class RunStarted(Event):
    """The run has started.

    Attributes:
        steps: 0 for a script, which saves its own checkpoints.
        num_servers: how many of the ``world_size`` ranks are parameter servers.
        resumed_from_step: None for a new run.
        source: another run, with whose checkpoint of that step this one begins; None if it is its own.
        evaluates: whether that checkpoint is evaluated, without training.
        notes: remarks on the plan for the user.
    """

    name: str
    run_dir: str
    strategy: str
    job: str
    world_size: int
    steps: int
    num_servers: int = 0
    resumed_from_step: int | None = None
    source: str | None = None
    evaluates: bool = False
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class WaitingForResources(Event):
    """The run waits for room in the cluster for ``wanted``, or for the start of its workers.

    ``why`` says what is missing and who holds it; empty if that is not known.
    """

    waited_s: float
    wanted: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Noted(Event):
    """A remark for the user."""

    message: str


@dataclass(frozen=True, kw_only=True)
class WaitingInQueue(Event):
    """The run waits for its turn in the queue of the cluster.

    Attributes:
        ahead: the runs before it, in order.
        running: the runs that have workers.
        why: what it needs, what is free, and who holds the rest.
        unfit: the cluster is too small for it, so that it has no place in the line.
    """

    waited_s: float
    ahead: tuple[str, ...]
    running: tuple[str, ...]
    why: str
    unfit: bool = False


@dataclass(frozen=True, kw_only=True)
class Yielded(Event):
    """The run has released its workers after ``step`` for the run ``to``, and continues when that leaves room."""

    step: int
    to: str


RunState = Literal[
    "waiting", "running", "recovering", "replacing", "growing", "yielding", "finished", "pruned", "failed", "killed"
]
"""What a run does or how it ended, as ``run.json`` and ``orchestrator runs`` name it.

It is ``waiting`` without workers; ``recovering`` after a failure, ``replacing`` workers that must leave and ``growing``
until the next step is done; ``yielding`` while it releases its workers for another run. A search has ended a run that
is ``pruned``.
"""


@dataclass(frozen=True, kw_only=True)
class StateChanged(Event):
    """The run has come into another ``state``. For the first state and the last one, it starts and ends instead."""

    state: RunState


@dataclass(frozen=True, kw_only=True)
class GenerationStarted(Event):
    """A process group has been formed.

    Attributes:
        precision: what the ranks compute in.
        workers: the node and device of each rank.
    """

    generation: int
    backend: str
    device: str
    precision: str
    workers: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class FirstStepDone(Event):
    """A rank has completed its first step of a generation; ``startup`` has the seconds of each part of its start."""

    generation: int
    startup: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class StageSummary:
    """A stage of the model; ``time_share`` is its share of the measured time, 0 to 1, None if it was not measured."""

    layers: tuple[str, ...]
    num_parameters: int
    time_share: float | None


@dataclass(frozen=True, kw_only=True)
class ModelCut(Event):
    """The model has been cut into stages, in their order."""

    stages: tuple[StageSummary, ...]


@dataclass(frozen=True, kw_only=True)
class MetricsLogged(Event):
    """Metrics of the whole run at a step, by the names that they have in MLflow, with the specs of those declared."""

    step: int
    metrics: Mapping[str, float]
    specs: tuple[MetricSpec, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SystemMetricsLogged(Event):
    """System metrics of the nodes; ``step`` counts the readings."""

    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class StepsKnown(Event):
    """A script has reported how many ``steps`` the run has."""

    steps: int


@dataclass(frozen=True, kw_only=True)
class RankPrinted(Event):
    """The script of a rank has printed ``lines``. Only the console uses it; the log of the rank has them."""

    rank: int
    lines: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class RankProgress(Event):
    """The progress of a rank. Only the console uses it; the journal does not keep it.

    ``step_ms`` is the mean time of recent steps, without the time spent waiting for other ranks; ``evaluated``: see
    :class:`~orchestrator.protocol.messages.Heartbeat`.
    """

    rank: int
    step: int
    phase: str
    step_ms: float | None = None
    node: str = ""
    evaluated: tuple[int, int | None] | None = None


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved(Event):
    """A checkpoint is on disk. Writing it took ``seconds``; training stood still for ``stall_ms``."""

    step: int
    path: str
    seconds: float
    stall_ms: float
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class BestFound(Event):
    """The evaluation after ``step`` is the best so far by ``metric``; its checkpoint is kept."""

    step: int
    metric: str
    value: float


@dataclass(frozen=True, kw_only=True)
class CheckpointFailed(Event):
    """A checkpoint could not be written; training continues."""

    step: int
    reason: str


ONLY_OWN = "only what the script itself has saved is kept"
"""What there is of a script that was stopped."""


def at_step(step: int | None) -> str:
    """Return `` at step 3``; empty if the step is not known."""
    return "" if step is None else f" at step {step}"


@dataclass(frozen=True, kw_only=True)
class WorkerFailure(Event):
    """A rank has failed.

    Attributes:
        display_name: the rank's name for users.
        step: the last one that it has done; None for a script that has reported none.
        log: the path of its log file.
        own_frames: the part of the traceback that is of the user's files, or else of a library; empty if it has none.
    """

    rank: int
    display_name: str
    step: int | None
    reason: str
    traceback: str
    log: str
    log_tail: str
    own_frames: str = ""

    @property
    def what(self) -> str:
        """Which rank has failed, and where: ``rank 1 failed at step 3``."""
        return f"{self.display_name} failed{at_step(self.step)}"


class WorkerFailed(WorkerFailure):
    """The run fails because of this rank, the first that failed."""


class WorkerLost(WorkerFailure):
    """A rank has failed, and the run recovers."""


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """A slow rank.

    Times are means per step in milliseconds; the times of the others are medians over the other ranks.

    Attributes:
        slower_by: how many times longer the rank takes than the others.
        throughput_loss: the share of the run's throughput, 0 to 1, that would be gained if its steps took the median
            time of the others.
    """

    rank: int
    step: int
    slower_by: float
    compute_ms: float
    others_compute_ms: float
    data_wait_ms: float
    others_data_wait_ms: float
    throughput_loss: float


@dataclass(frozen=True, kw_only=True)
class StragglerFound(Straggler, Event):
    """A rank is persistently slower than the others; ``node`` is its host, with the address."""

    display_name: str
    node: str


PauseReason = Literal["preempted", "growing", "yielded"]
"""Why all ranks end a generation after a step: workers must leave, more could join, or another run goes first."""

EndReason = PauseReason | Literal["stopped"]
"""Why the driver asked all ranks to end a generation: to go on with other workers, or to end the run."""


@dataclass(frozen=True, kw_only=True)
class Recovered(Event):
    """Training continues from ``step`` after a failure or a planned pause.

    Attributes:
        steps_lost: how many steps are repeated; None if a script decides that, and has not reported it.
        replaced: the ranks that have new workers.
        in_place: whether training continues from the state of the survivors, rather than from a checkpoint or anew.
        seconds: the time from the failure to the end of the next step.
        planned: the reason for the pause; None after a failure.
    """

    generation: int
    step: int
    steps_lost: int | None
    replaced: tuple[int, ...]
    in_place: bool
    seconds: float
    num_workers: int
    num_workers_before: int
    planned: PauseReason | None = None


@dataclass(frozen=True, kw_only=True)
class Continued(Event):
    """The run is about to go on from the state after ``step``; what it has reported of later steps counts no more."""

    step: int


@dataclass(frozen=True, kw_only=True)
class StopRequested(Event):
    """A signal asks the run to stop after a checkpoint."""

    signal: str


@dataclass(frozen=True, kw_only=True)
class Warned(Event):
    """A message that the user should read; training continues."""

    message: str


@dataclass(frozen=True, kw_only=True)
class SampleSaved(Event):
    """A sample of the job after ``step`` is on disk: an image (``.png``) or a text (``.txt``, ``.json``).

    ``path`` is relative to the run directory.
    """

    step: int
    name: str
    path: str


@dataclass(frozen=True, kw_only=True)
class TextSampled(Event):
    """The last text of this ``name`` that ``Job.sample`` returned."""

    text: str
    name: str = "sample"


@dataclass(frozen=True, kw_only=True)
class RunEnded(Event):
    """The run has ended.

    Attributes:
        status: FINISHED, PRUNED, FAILED or KILLED.
        reason: empty after a success.
        next_commands: what the user may run next.
    """

    status: str
    exit_code: int
    reason: str
    summary: Mapping[str, Any]
    next_commands: tuple[str, ...] = ()


class Sink(Protocol):
    """A receiver of events. It never raises and never blocks for long."""

    def emit(self, event: Event) -> None: ...

    def close(self) -> None:
        """Release what it has; here, nothing."""
        return

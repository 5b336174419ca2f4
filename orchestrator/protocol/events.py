"""What happens in a run, as small dataclasses: one stream feeds journal, console and, from the journal, MLflow."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True)
class Event:
    """``time`` is wall-clock seconds since the epoch."""

    time: float = field(default_factory=time.time)

    @property
    def kind(self) -> str:
        """The class name in snake case, as it stands in ``events.jsonl``."""
        return re.sub(r"(?<!^)(?=[A-Z])", "_", type(self).__name__).lower()


@dataclass(frozen=True, kw_only=True)
class RunStarted(Event):
    """``num_shards``: ranks of ``world_size`` that hold parameters. ``resumed_from_step`` is None for a new run;
    ``notes``: what a person should know of the plan."""

    name: str
    run_dir: str
    strategy: str
    job: str
    world_size: int
    steps: int
    num_shards: int = 0
    resumed_from_step: int | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class WaitingForResources(Event):
    waited_s: float
    wanted: str
    holders: str


@dataclass(frozen=True, kw_only=True)
class GenerationStarted(Event):
    """A process group has been formed; ``workers`` has one description per rank."""

    generation: int
    backend: str
    device: str
    workers: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class FirstStepDone(Event):
    """The first step of a generation has ended on some rank; ``startup``: the seconds of the parts before it, there."""

    generation: int
    startup: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class StageSummary:
    """``time_share``: of the measured time of all layers, 0 to 1; None where nothing was measured."""

    layers: tuple[str, ...]
    num_parameters: int
    time_share: float | None


@dataclass(frozen=True, kw_only=True)
class ModelCut(Event):
    """How the model was cut, by stage."""

    stages: tuple[StageSummary, ...]


@dataclass(frozen=True, kw_only=True)
class MetricsLogged(Event):
    """One point: figures of the whole run at a step, under their MLflow names."""

    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class SystemMetricsLogged(Event):
    """Readings of the nodes; ``step`` counts the readings."""

    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class RankProgress(Event):
    """Where a rank stands; for the console alone, not kept.

    ``step_ms`` is the mean time of its recent steps without waiting for other ranks.
    """

    rank: int
    step: int
    phase: str
    step_ms: float | None = None
    node: str = ""


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved(Event):
    step: int
    path: str
    seconds: float
    stall_ms: float
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class CheckpointFailed(Event):
    step: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class WorkerFailed(Event):
    """The first rank that failed; ``display_name`` is how people call it, ``log`` the path of its log file."""

    rank: int
    display_name: str
    step: int
    reason: str
    traceback: str
    log: str
    log_tail: str


@dataclass(frozen=True, kw_only=True)
class WorkerLost(Event):
    """A generation has ended early, and the run goes on: fields as those of :class:`WorkerFailed`."""

    rank: int
    display_name: str
    step: int
    reason: str
    traceback: str
    log: str


@dataclass(frozen=True, kw_only=True)
class StragglerFound(Event):
    """A rank is persistently slower than the others: its own mean times of a step, and the median of theirs."""

    rank: int
    display_name: str
    node: str
    step: int
    slower_by: float
    compute_ms: float
    others_compute_ms: float
    data_wait_ms: float
    others_data_wait_ms: float


@dataclass(frozen=True, kw_only=True)
class Recovered(Event):
    """Training goes on after a failure, from ``step``; or after a pause, and ``planned`` says what for.

    ``replaced``: the ranks with new workers; ``in_place``: from what the survivors held, not from a checkpoint or the
    beginning; ``seconds``: from the failure to the end of the next step.
    """

    generation: int
    step: int
    steps_lost: int
    replaced: tuple[int, ...]
    in_place: bool
    seconds: float
    num_workers: int
    num_workers_before: int
    planned: str | None = None


@dataclass(frozen=True, kw_only=True)
class StopRequested(Event):
    signal: str


@dataclass(frozen=True, kw_only=True)
class Warned(Event):
    message: str


@dataclass(frozen=True, kw_only=True)
class TextSampled(Event):
    """What ``Job.sample`` returned after training."""

    text: str


@dataclass(frozen=True, kw_only=True)
class RunEnded(Event):
    """``status`` is FINISHED, FAILED or KILLED; ``reason`` is empty after a success.

    ``next_commands`` is what the person may type next.
    """

    status: str
    exit_code: int
    reason: str
    summary: Mapping[str, Any]
    next_commands: tuple[str, ...] = ()


class Sink(Protocol):
    """Where events go. A sink never raises and never blocks for long."""

    def emit(self, event: Event) -> None: ...

    def close(self) -> None: ...

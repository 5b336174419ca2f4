"""What defines a run, for its driver, and what all parts of the driver have at hand: signals, the lease, the result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from orchestrator.config.redact import Redactor
from orchestrator.config.schema import Config
from orchestrator.driver.process.signals import StopSignals
from orchestrator.driver.process.turns import Turns
from orchestrator.policy.elastic import Sizes
from orchestrator.protocol.events import (
    Event,
    MetricsLogged,
    Noted,
    Sink,
    SystemMetricsLogged,
    Warned,
)
from orchestrator.protocol.metrics import MetricSpec
from orchestrator.records.lease import Lease
from orchestrator.records.run_dir import RunDir
from orchestrator.timeline import Timeline


class EventStream:
    """Masks the secrets in each event once, and passes it to the journal and every sink. Metrics keep their values."""

    def __init__(self, sinks: Sequence[Sink], redactor: Redactor, *, journal: Sink | None = None):
        self._sinks = tuple(sinks)
        self._redactor = redactor
        self._journal: tuple[Sink, ...] = () if journal is None else (journal,)

    def emit(self, event: Event) -> None:
        """Pass ``event``, with all secrets masked, to the journal and to every sink, in this order."""
        self._pass(event, (*self._journal, *self._sinks))

    def record(self, event: Event) -> None:
        """Pass ``event`` to the journal alone."""
        self._pass(event, self._journal)

    def show(self, event: Event) -> None:
        """Pass ``event`` to every sink, and not to the journal."""
        self._pass(event, self._sinks)

    def note(self, message: str) -> None:
        """Emit a remark."""
        self.emit(Noted(message=message))

    def warn(self, message: str) -> None:
        """Emit a warning."""
        self.emit(Warned(message=message))

    def close(self) -> None:
        """Close the journal and every sink."""
        for sink in (*self._journal, *self._sinks):
            sink.close()

    def _pass(self, event: Event, sinks: Sequence[Sink]) -> None:
        masked = self._masked(event)
        for sink in sinks:
            sink.emit(masked)

    def _masked(self, event: Event) -> Event:
        if isinstance(event, (MetricsLogged, SystemMetricsLogged)):
            return replace(event, metrics={self._redactor.text(name): value for name, value in event.metrics.items()})
        masked: Event = self._redactor.data(event, by_key=False)
        return masked


class Silent:
    """Shows nothing, for a run that nobody asked for."""

    def emit(self, event: Event) -> None:
        """Take ``event``."""

    def close(self) -> None:
        """Close the console."""


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """What defines a run.

    Attributes:
        checkpoint: the checkpoint to resume from; None for a new run.
        resumed_from_step: the step of this checkpoint.
        started_at: seconds since the epoch.
        source: the other run that has made the checkpoint; None if this one has.
        secrets: texts to mask in what other nodes upload.
        pickled_job: see :class:`~orchestrator.protocol.messages.WorkerEnvironment`.
        turns: makes the turns of the run, with the arguments of :class:`Turns`.
        checked_nodes: the ids of the nodes of a cluster that have been found able to run its workers.
        known_namesakes: the uids of other runs of its name that the user has been warned of.
    """

    config: Config
    sizes: Sizes
    run_dir: RunDir
    run_uid: str
    checkpoint: Path | None
    resumed_from_step: int | None
    started_at: float
    tokens_per_sample: int | None
    source: RunDir | None = None
    secrets: tuple[str, ...] = ()
    pickled_job: bytes | None = None
    turns: Callable[..., Turns] = Turns
    checked_nodes: frozenset[str] = frozenset()
    known_namesakes: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """What every part of the driver of a run has at hand: the run, where its events go, its signals and its lease."""

    spec: RunSpec
    events: EventStream
    stop: StopSignals
    lease: Lease


@dataclass(frozen=True, kw_only=True, repr=False)
class RunResult:
    """How a run ended.

    Attributes:
        status: ``"FINISHED"``, ``"FAILED"``, ``"KILLED"`` by a signal, or ``"PRUNED"`` by a search.
        exit_code: 0 finished or pruned, 1 failed, 2 failed before it trained because it no longer fits the cluster, 3
            finished but the last checkpoint is lost or records are not uploaded, 129, 130 or 143 killed by SIGHUP,
            SIGINT or SIGTERM.
        run_dir: the directory with the records, logs and checkpoints. If ``output_dir`` is a URL, this is the local
            directory from which they were uploaded; it has the files of this node.
        url: where the run is, if ``output_dir`` is a URL; None otherwise.
        reason: why the run ended; empty if it finished.
        summary: the last values of the metrics and the figures of the run: ``"final_loss"``, ``"val_loss"``,
            ``"val_<metric>"``, ``"steps"``, ``"samples_per_s"``, ``"startup_s"`` (seconds from the call to the first
            step), ``"waited_s"`` (seconds of it spent waiting for resources), ``"restarts"``, ``"mlflow_run_id"``, ...
            A metric without a value is missing.
        timeline: the last timed step of its pipeline stages; None if there are none.
        metrics: the declarations of the metrics that were logged.
    """

    status: Literal["FINISHED", "PRUNED", "FAILED", "KILLED"]
    exit_code: int
    run_dir: Path
    url: str | None = None
    reason: str = ""
    summary: Mapping[str, Any] = field(default_factory=dict)
    timeline: Timeline | None = None
    metrics: tuple[MetricSpec, ...] = ()

    def __repr__(self) -> str:
        """Return one line: the status, the reason if there is one, the results, and where the run is."""
        reason = [f"reason={self.reason!r}"] if self.reason else []
        keys = ("steps", "final_loss", *(key for key in self.summary if key.startswith("val_")))
        results = [f"{key}={value:.6g}" for key in keys if isinstance(value := self.summary.get(key), (int, float))]
        where = f"run_dir={self.url or str(self.run_dir)!r}"
        return f"RunResult({', '.join([self.status, *reason, *results, where])})"

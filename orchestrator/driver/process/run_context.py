"""What defines a run, for its driver, and what all parts of the driver have at hand: events, signals, the lease."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from orchestrator.config.redact import Redactor
from orchestrator.config.schema import Config
from orchestrator.driver.process.signals import StopSignals
from orchestrator.policy.elastic import Sizes
from orchestrator.protocol.events import (
    Event,
    MetricsLogged,
    Noted,
    RunEnded,
    Sink,
    SystemMetricsLogged,
    Warned,
    WorkerFailed,
)
from orchestrator.protocol.queue_entries import QueueEntry
from orchestrator.records.lease import Lease
from orchestrator.records.run_dir import RunDir


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


class FailureSink:
    """Passes on only why a run failed, for a run that nobody asked for and that cannot be resumed."""

    def __init__(self, sink: Sink | None):
        self._sink = sink

    def emit(self, event: Event) -> None:
        """Show ``event`` if it is a failure."""
        if self._sink is None:
            return
        if isinstance(event, WorkerFailed):
            self._sink.emit(event)
        elif isinstance(event, RunEnded) and event.status != "FINISHED":
            self._sink.emit(replace(event, next_commands=()))

    def close(self) -> None:
        """Close the console."""
        if self._sink is not None:
            self._sink.close()


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
        queue_entry: the run in the queue of the cluster; None if it does not queue.
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
    queue_entry: QueueEntry | None = None
    checked_nodes: frozenset[str] = frozenset()
    known_namesakes: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """What every part of the driver of a run has at hand: the run, where its events go, its signals and its lease."""

    spec: RunSpec
    events: EventStream
    stop: StopSignals
    lease: Lease

"""The events of a run on their way to the journal, the console and Prometheus: the one place that masks them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from orchestrator.config.redact import Redactor
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

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
    """Masks the secrets in each event once, and passes it to every sink, in order. Metrics keep their values."""

    def __init__(self, sinks: Sequence[Sink], redactor: Redactor):
        self._sinks = tuple(sinks)
        self._redactor = redactor

    def emit(self, event: Event) -> None:
        """Pass ``event``, with all secrets masked, to every sink."""
        masked = self._masked(event)
        for sink in self._sinks:
            sink.emit(masked)

    def note(self, message: str) -> None:
        """Emit a remark."""
        self.emit(Noted(message=message))

    def warn(self, message: str) -> None:
        """Emit a warning."""
        self.emit(Warned(message=message))

    def close(self) -> None:
        """Close every sink."""
        for sink in self._sinks:
            sink.close()

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

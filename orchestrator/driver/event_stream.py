"""The events of a run on their way to the journal and the console."""

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
    """Passes each event to every sink, in order. Sinks must not raise."""

    def __init__(self, sinks: Sequence[Sink]):
        self._sinks = tuple(sinks)

    def emit(self, event: Event) -> None:
        """Pass ``event`` to every sink."""
        for sink in self._sinks:
            sink.emit(event)

    def note(self, message: str) -> None:
        """Emit a remark."""
        self.emit(Noted(message=message))

    def warn(self, message: str) -> None:
        """Emit a warning."""
        self.emit(Warned(message=message))


class RedactingSink:
    """Masks secrets in the events for ``sink``. Metrics keep their values."""

    def __init__(self, sink: Sink, redactor: Redactor):
        self._sink = sink
        self._redactor = redactor

    def emit(self, event: Event) -> None:
        """Pass on ``event`` with all secrets masked."""
        if isinstance(event, (MetricsLogged, SystemMetricsLogged)):
            metrics = {self._redactor.text(name): value for name, value in event.metrics.items()}
            self._sink.emit(replace(event, metrics=metrics))
        else:
            self._sink.emit(self._redactor.data(event, by_key=False))

    def close(self) -> None:
        """Close ``sink``."""
        self._sink.close()


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

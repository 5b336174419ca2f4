"""The events of a run on their way to the journal and the console."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.protocol.events import Event, Sink, Warned


class EventStream:
    """Passes each event to every sink, in the order of ``sinks``. It decides nothing and never raises."""

    def __init__(self, sinks: Sequence[Sink]):
        self._sinks = tuple(sinks)

    def emit(self, event: Event) -> None:
        """Pass ``event`` to every sink."""
        for sink in self._sinks:
            sink.emit(event)

    def warn(self, message: str) -> None:
        """Emit a warning."""
        self.emit(Warned(message=message))

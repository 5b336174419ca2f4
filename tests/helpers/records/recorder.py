"""A sink of events that keeps them."""

from orchestrator.protocol.events import Event


class Recorder:
    def __init__(self) -> None:
        self.seen: list[Event] = []

    def emit(self, event: Event) -> None:
        self.seen.append(event)

    def close(self) -> None: ...

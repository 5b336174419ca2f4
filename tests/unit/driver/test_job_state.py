"""The state of a run as Ray's dashboard shows it."""

from typing import Any

import pytest

from orchestrator.driver.reporting import job_state
from orchestrator.protocol import events


def queued(*ahead: str, **fields: Any) -> events.Event:
    return events.WaitingInQueue(waited_s=1, ahead=ahead, running=("other",), why="need 2 x {CPU: 1}", **fields)


@pytest.mark.parametrize(
    ("event", "state"),
    [
        (queued("first", "second"), "waiting: place 3"),
        (queued(), "waiting: place 1"),
        (queued(unfit=True), "waiting: without a place"),
        (events.WaitingForResources(waited_s=2, wanted="4 workers", why="free 0"), "waiting: 4 workers"),
        (events.StateChanged(state="running"), "running"),
        (events.StateChanged(state="recovering"), "recovering"),
        (events.Yielded(step=4, to="urgent"), "waiting: yielded to urgent"),
        (events.RunEnded(status="KILLED", exit_code=143, reason="", summary={}), "killed"),
        (events.Warned(message="slow"), None),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, events.Event) else None,
)
def test_the_state_after_an_event(event: events.Event, state: str | None) -> None:
    assert job_state(event) == state

"""The state of a run as Ray's dashboard shows it."""

from typing import Any

from orchestrator.driver.reporting import job_state
from orchestrator.protocol.events import (
    Event,
    RunEnded,
    StateChanged,
    WaitingForResources,
    WaitingInQueue,
    Warned,
    Yielded,
)


def queued(*ahead: str, **fields: Any) -> Event:
    return WaitingInQueue(waited_s=1, ahead=ahead, running=("other",), why="need 2 x {CPU: 1}; free 0", **fields)


def test_a_run_waits_then_runs_then_ends() -> None:
    events = [
        queued("first", "second"),
        queued(),
        queued(unfit=True),
        WaitingForResources(waited_s=2, wanted="4 workers", why="need 4 x {CPU: 1}; free 0"),
        StateChanged(state="running"),
        StateChanged(state="recovering"),
        Yielded(step=4, to="urgent"),
        RunEnded(status="KILLED", exit_code=143, reason="", summary={}),
    ]
    assert [job_state(event) for event in events] == [
        "waiting: place 3",
        "waiting: place 1",
        "waiting: without a place",
        "waiting: 4 workers",
        "running",
        "recovering",
        "waiting: yielded to urgent",
        "killed",
    ]
    assert job_state(Warned(message="slow")) is None

"""What Ray's dashboard and ``ray job list`` show about the job of a launch."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from orchestrator.compat.ray.cluster import add_job_metadata
from orchestrator.config.redact import Redactor
from orchestrator.config.schema import Config
from orchestrator.protocol.events import (
    Event,
    RunEnded,
    RunStarted,
    StateChanged,
    WaitingForResources,
    WaitingInQueue,
    Yielded,
)


def launch_name(configs: Sequence[Config]) -> str:
    """Return the name of a run, or of the sweep that several runs form."""
    first = configs[0]
    return first.run_name if len(configs) == 1 else f"{first.job_name}-sweep-of-{len(configs)}"


def job_metadata(configs: Sequence[Config], redactor: Redactor) -> dict[str, str]:
    """Return what is known before the runs of a launch begin, with secrets masked."""
    metadata = {
        "job_name": launch_name(configs),  # the column "Name" of the dashboard
        "run": launch_name(configs),
        "strategy": ",".join(dict.fromkeys(c.strategy.name for c in configs)),
        "job": ",".join(dict.fromkeys(c.job_name for c in configs)),
        "tracking": str(configs[0].tracking.uri),
        "output_dir": configs[0].output_dir,
    }
    return {key: redactor.text(value) for key, value in metadata.items()}


def job_state(event: Event) -> str | None:
    """Return the state of a run after ``event``, with what it waits for; None if the event does not change it."""
    match event:
        case RunStarted():
            return "waiting"
        case WaitingInQueue():
            return "waiting: without a place" if event.unfit else f"waiting: place {len(event.ahead) + 1}"
        case WaitingForResources():
            return f"waiting: {event.wanted}"
        case Yielded():
            return f"waiting: yielded to {event.to}"
        case StateChanged():
            return event.state
        case RunEnded():
            return event.status.lower()
    return None


class JobStateSink:
    """An event sink that keeps the state of a run in the metadata of its job, if it was submitted as one."""

    def __init__(self) -> None:
        self._state = ""

    def emit(self, event: Event) -> None:
        """Write the state if ``event`` changes it."""
        state = job_state(event)
        if state is not None and state != self._state:
            self._state = state
            with contextlib.suppress(Exception):  # of any type: what the dashboard shows must not end a run
                add_job_metadata({"state": state})

    def close(self) -> None:
        """Do nothing: every change has been written."""


def add_tracking_page(page: str) -> None:
    """Add the address of the page with the charts of a run on the tracking server."""
    add_job_metadata({"mlflow": page})

"""What Ray's dashboard and ``ray job list`` show about the job of a launch."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.compat.ray import add_job_metadata
from orchestrator.config.redact import Redactor
from orchestrator.config.schema import Config


def launch_name(configs: Sequence[Config]) -> str:
    """Return the name of a run, or of the sweep that several runs form."""
    first = configs[0]
    return first.run_name if len(configs) == 1 else f"{first.job_name}-sweep-of-{len(configs)}"


def job_metadata(configs: Sequence[Config], redactor: Redactor) -> dict[str, str]:
    """Return what is known before the runs of a launch begin, with secrets masked."""
    metadata = {
        "run": launch_name(configs),
        "strategy": ",".join(dict.fromkeys(c.strategy.name for c in configs)),
        "job": ",".join(dict.fromkeys(c.job_name for c in configs)),
        "tracking": str(configs[0].tracking.uri),
    }
    return {key: redactor.text(value) for key, value in metadata.items()}


def add_tracking_page(page: str) -> None:
    """Add the address of the page with the charts of a run on the tracking server."""
    add_job_metadata({"mlflow": page})

"""A sweep in MLflow: its runs have one tag, and a run of its own carries the report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.tracking.sweep_report import TEXT
from orchestrator.tracking.tags import COLOR, DESCRIPTION, SWEEP_ID
from orchestrator.tracking.views import experiment_tags, obsolete_tags, sweep_view

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

_OWN_RUN = "orchestrator.sweep_id"
_BLACK = "#111827"  # no strategy has it
_MAX_DESCRIPTION = 5000
_CUT = f"\n\nThe rest is in the artifact {TEXT}."


def open_sweep(
    client: MlflowClient, experiment_id: str, sweep: Mapping[str, str], *, start_ms: int, running: bool
) -> None:
    """Create the sweep's own run and its saved view, unless they exist.

    Args:
        client: the server.
        experiment_id: the experiment of the runs.
        sweep: the id and the name of the sweep.
        start_ms: milliseconds since the epoch, for a run that is created.
        running: whether one of its runs has not ended.
    """
    own = _own_run(client, experiment_id, sweep)
    if own is None:
        experiment = client.get_experiment(experiment_id)
        for key, value in experiment_tags([sweep_view(sweep["id"], sweep["name"], created_ms=start_ms)]).items():
            client.set_experiment_tag(experiment_id, key, value)
        for key in obsolete_tags(experiment.tags):
            client.delete_experiment_tag(experiment_id, key)
        tags = {_OWN_RUN: sweep["id"], SWEEP_ID: sweep["id"], "sweep": sweep["name"], COLOR: _BLACK}
        client.create_run(experiment_id, start_time=start_ms, tags=tags, run_name=f"sweep: {sweep['name']}")
    elif running and own.info.status != "RUNNING":
        client.update_run(own.info.run_id, status="RUNNING")


def end_sweep(client: MlflowClient, experiment_id: str, sweep: Mapping[str, str]) -> None:
    """Give the sweep the worst status and the last end of its runs, unless one of them is still running."""
    own = _own_run(client, experiment_id, sweep)
    assert own is not None, "open_sweep creates it"
    found = client.search_runs([experiment_id], f"tags.{SWEEP_ID} = '{sweep['id']}'")
    runs = [run.info for run in found if run.info.run_id != own.info.run_id]
    statuses = {run.status for run in runs}
    if "RUNNING" not in statuses:
        worst = next((s for s in ("FAILED", "KILLED") if s in statuses), "FINISHED")
        client.set_terminated(own.info.run_id, worst, max(run.end_time for run in runs))


def close_sweep(
    client: MlflowClient, experiment_id: str, sweep: Mapping[str, str], *, report: str, files: Iterable[Path]
) -> None:
    """Make ``report`` (Markdown) the description of the sweep's own run, and attach ``files`` to it."""
    own = _own_run(client, experiment_id, sweep)
    assert own is not None, "open_sweep creates it"
    if report:
        client.set_tag(own.info.run_id, DESCRIPTION, _shortened(report))
    for file in files:
        client.log_artifact(own.info.run_id, str(file))


def _shortened(report: str) -> str:
    """``report`` as far as it fits into a tag, in whole lines."""
    if len(report) <= _MAX_DESCRIPTION:
        return report
    return report[: _MAX_DESCRIPTION - len(_CUT)].rpartition("\n")[0] + _CUT


def _own_run(client: MlflowClient, experiment_id: str, sweep: Mapping[str, str]) -> Run | None:
    runs: Sequence[Run] = client.search_runs([experiment_id], f"tags.`{_OWN_RUN}` = '{sweep['id']}'", max_results=1)
    return runs[0] if runs else None

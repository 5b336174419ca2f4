"""A sweep in MLflow: its runs have one tag, and a run of its own carries the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.config.text import plain
from orchestrator.features.tracking import views
from orchestrator.records.storable_names import storable_text
from orchestrator.records.sweep_dir import REPORT

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

_OWN_RUN = "orchestrator.sweep_id"
_RATE = "summary/samples_per_s"
_BLACK = "#111827"  # no strategy has it


def open_sweep(
    client: MlflowClient, experiment_id: str, sweep: Mapping[str, str], *, start_ms: int, running: bool
) -> None:
    """Create the sweep's own run and its saved view, unless they exist.

    Args:
        experiment_id: the experiment of the runs.
        sweep: the id and the name of the sweep.
        start_ms: milliseconds since the epoch, for a run that is created.
        running: whether one of its runs has not ended.
    """
    own = _own_run(client, experiment_id, sweep)
    if own is None:
        experiment = client.get_experiment(experiment_id)
        view = views.sweep_view(
            sweep["id"], sweep["name"], created_ms=start_ms, has_settings=bool(sweep.get("settings"))
        )
        for key, value in views.experiment_tags([view]).items():
            client.set_experiment_tag(experiment_id, key, value)
        for key in views.obsolete_tags(experiment.tags):
            client.delete_experiment_tag(experiment_id, key)
        tags = {_OWN_RUN: sweep["id"], views.COLOR: _BLACK, **views.sweep_tags(sweep)}
        name = storable_text(f"sweep: {sweep['name']}", views.MAX_NAME_LENGTH)
        client.create_run(experiment_id, start_time=start_ms, tags=tags, run_name=name)
        own = _own_run(client, experiment_id, sweep)  # another process may have created one meanwhile
        assert own is not None
    if running and own.info.status != "RUNNING":
        client.update_run(own.info.run_id, status="RUNNING")


def end_sweep(client: MlflowClient, experiment_id: str, sweep: Mapping[str, str]) -> None:
    """Give the sweep the worst status and the last end of its runs, unless one of them is still running."""
    own = _own_run(client, experiment_id, sweep)
    assert own is not None, "open_sweep creates it"
    runs = [run.info for run in _runs(client, experiment_id, sweep)]
    statuses = {run.status for run in runs}
    if "RUNNING" not in statuses:
        worst = next((s for s in ("FAILED", "KILLED") if s in statuses), "FINISHED")
        client.set_terminated(own.info.run_id, worst, max(run.end_time for run in runs))


def close_sweep(
    client: MlflowClient, experiment_id: str, sweep: Mapping[str, str], *, report: str, files: Sequence[Path]
) -> None:
    """Give the sweep's own run ``report`` (Markdown) as description, ``files``, and the figures of its best runs."""
    own = _own_run(client, experiment_id, sweep)
    assert own is not None, "open_sweep creates it"
    run_id = own.info.run_id
    for file in files:
        client.log_artifact(run_id, str(file))
    if report:
        client.set_tag(run_id, views.DESCRIPTION, _description(report, run_id, [file.name for file in files]))
        _name_in_experiment(client, experiment_id, sweep, report, run_id)
    _log_best(client, experiment_id, own, sweep)


def _description(report: str, run_id: str, files: Sequence[str]) -> str:
    """The report, with a link to its picture before the table."""
    pictures = [views.picture(run_id, name) for name in files if name.endswith(".png")]
    verdict, rule, table = report.partition("\n|")
    return views.shortened("\n".join([verdict, *pictures, f"{rule}{table}"]), views.MAX_LENGTH, rest_in=REPORT)


def _name_in_experiment(
    client: MlflowClient, experiment_id: str, sweep: Mapping[str, str], report: str, run_id: str
) -> None:
    """Add the verdict of the newest sweep to the description of the experiment, unless a user has written that."""
    described = client.get_experiment(experiment_id).tags.get(views.DESCRIPTION, "")
    if described.startswith(views.NOTE_BEGINS):
        view = views.sweep_view(sweep["id"], sweep["name"], created_ms=0)
        verdict = next((line for line in report.splitlines() if line and not line.startswith(("#", "|"))), "")
        charts, whole = views.page(".", experiment_id, view), f"./#/experiments/{experiment_id}/runs/{run_id}"
        newest = f"Newest sweep: [{plain(view.name)}]({charts}). {verdict} [Report]({whole})"
        client.set_experiment_tag(experiment_id, views.DESCRIPTION, f"{views.note(experiment_id)}\n\n{newest}")


def _log_best(client: MlflowClient, experiment_id: str, own: Run, sweep: Mapping[str, str]) -> None:
    """Give the sweep's own run the summary of its fastest run, and the names of that and of the best run."""
    from mlflow.entities import Metric

    runs = _runs(client, experiment_id, sweep)
    finished = [run for run in runs if run.info.status == "FINISHED" and views.PRUNED not in run.data.tags]
    if pruned := len([run for run in runs if views.PRUNED in run.data.tags]):
        client.set_tag(own.info.run_id, views.PRUNED, str(pruned))
    metric = runs[0].data.params.get("sweep.metric", "")
    key = f"summary/{metric}"
    if with_result := [run for run in finished if key in run.data.metrics]:
        largest = runs[0].data.params.get("sweep.direction") == "maximize"
        best, *_ = sorted(with_result, key=lambda run: run.data.metrics[key], reverse=largest)
        client.set_tag(own.info.run_id, "best", f"{best.info.run_name}: {metric} {best.data.metrics[key]:.5g}")
    finished = [run for run in finished if _RATE in run.data.metrics]
    if finished:
        fastest = max(finished, key=lambda run: run.data.metrics[_RATE])
        figures = {key: value for key, value in fastest.data.metrics.items() if key.startswith("summary/")}
        metrics = [Metric(key, value, fastest.info.end_time, 0) for key, value in figures.items()]
        client.log_batch(own.info.run_id, metrics=metrics)
        client.set_tag(own.info.run_id, "fastest", fastest.info.run_name)


def _own_run(client: MlflowClient, experiment_id: str, sweep: Mapping[str, str]) -> Run | None:
    """The sweep's own run. Of several, all processes keep the same one, and delete the others."""
    found = client.search_runs([experiment_id], f"tags.`{_OWN_RUN}` = '{sweep['id']}'")
    runs: list[Run] = sorted(found, key=lambda run: str(run.info.run_id))
    for run in runs[1:]:
        client.delete_run(run.info.run_id)
    return runs[0] if runs else None


def _runs(client: MlflowClient, experiment_id: str, sweep: Mapping[str, str]) -> Sequence[Run]:
    """The runs of the sweep, without its own."""
    found: Sequence[Run] = client.search_runs(
        [experiment_id], f"tags.{views.SWEEP_ID} = '{sweep['id']}' AND {views.ALL_RUNS}"
    )
    return found

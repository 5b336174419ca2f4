"""Runs that were tracked in MLflow, read back as the records that they were uploaded from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.features.tracking.mlflow import connect
from orchestrator.features.tracking.views import PRUNED, SWEEP_ID, UID_TAG

_SUMMARY = "summary/"
_NEWEST_FIRST = ["attributes.start_time DESC"]


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """A run on a server.

    Attributes:
        record: what MLflow keeps of ``run.json``; parameters are texts.
    """

    client: Any
    run_id: str
    record: Mapping[str, Any]

    def points(self, *names: str) -> Iterator[tuple[float, dict[str, float]]]:
        """Yield ``(time, {name: value})`` of each step at which one of these metrics was logged, in order."""
        found: dict[int, tuple[float, dict[str, float]]] = {}
        for name in names:
            for metric in self.client.get_metric_history(self.run_id, name):
                found.setdefault(metric.step, (metric.timestamp / 1000, {}))[1][name] = metric.value
        for step in sorted(found):
            yield found[step]


def newest_runs(
    uri: str, *, most: int, sweep: str | None = None, request_timeout_s: float = 30.0
) -> Iterator[TrackedRun]:
    """Yield the newest runs on the server at ``uri``, the newest first.

    Args:
        sweep: yield all runs of the sweep whose id begins with it instead, or of the newest one for ``last``.
        request_timeout_s: the timeout of a request to the server.

    Raises:
        Exception: of any type, from MLflow, a database driver or HTTP.
    """
    client = connect(uri, request_timeout_s=request_timeout_s)
    experiments = [str(e.experiment_id) for e in client.search_experiments()]
    condition = f"tags.`{UID_TAG}` LIKE '%'"
    if sweep is not None:
        pattern = "%" if sweep == "last" else f"{sweep}%"
        in_sweep = f"{condition} AND tags.{SWEEP_ID} LIKE '{pattern}'"
        newest = client.search_runs(experiments, in_sweep, max_results=1, order_by=_NEWEST_FIRST)
        if not newest:
            return
        condition += f" AND tags.{SWEEP_ID} = '{newest[0].data.tags[SWEEP_ID]}'"
        most = 1000
    for run in client.search_runs(experiments, condition, max_results=most, order_by=_NEWEST_FIRST):
        yield TrackedRun(client=client, run_id=str(run.info.run_id), record=_record(run))


def _record(run: Any) -> dict[str, Any]:
    tags, params = run.data.tags, run.data.params
    values = run.data.metrics
    num_workers = int(tags.get("world_size", 1)) - int(params.get("strategy.num_shards", 0))
    return {
        "name": run.info.run_name,
        "state": PRUNED if PRUNED in tags else run.info.status.lower(),
        "strategy": tags.get("strategy"),
        "job": tags.get("job"),
        "params": params,
        "tags": tags,
        "plan": {"mesh": {"replicate": num_workers}},
        "started": run.info.start_time / 1000,
        "summary": {k.removeprefix(_SUMMARY): v for k, v in values.items() if k.startswith(_SUMMARY)},
    }

"""The views of the runs page that MLflow offers for every experiment of ours: tables and charts, as MLflow saves them.

MLflow keeps a saved view in a tag of the experiment, and opens it for a link that names it. The names of the fields are
those of MLflow's page.
"""

from __future__ import annotations

import base64
import colorsys
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlencode

from orchestrator.config.text import code
from orchestrator.planning.mesh import recorded_mesh
from orchestrator.records.storable_names import storable_name, storable_text

SWEEP_ID = "sweep_id"
"""The tag of all runs of a sweep, and of the sweep's own run."""

UID_TAG = "orchestrator.run_uid"
"""Identifies a run; the own run of a sweep has none."""

SETTINGS = "settings"
"""The tag with the settings in which a run differs from others of its sweep."""

PRUNED = "pruned"
"""The tag of a run that a search has ended early; MLflow has no such status."""

DESCRIPTION = "mlflow.note.content"
COLOR = "mlflow.runColor"

MAX_LENGTH = 5000
"""The length of a tag that every server accepts."""

MAX_NAME_LENGTH = 250
"""The length of the name of a run that every database of MLflow accepts."""

_COLORS = {
    "single": "#6b7280",
    "dp": "#7c3aed",
    "ddp": "#2272b4",
    "fsdp": "#4d7c0f",
    "hsdp": "#65a30d",
    "model_parallel": "#be123c",
    "pipeline": "#d97706",
    "ddp_pipeline": "#92400e",
    "fsdp_pipeline": "#a16207",
    "mesh": "#4338ca",
    "parameter_server": "#15803d",
    "hogwild": "#0d9488",
    "locked_sgd": "#db2777",
}
"""The color of a strategy in every chart: MLflow's own colors depend on the id of a run, and may coincide."""
_HUE_STEP = 0.618034
"""Between the hues of a sweep: the golden ratio keeps any number of them apart."""


def run_tags(record: Mapping[str, Any]) -> dict[str, str]:
    """Return the tags of a run; ``record`` has the contents of ``run.json``."""
    tags = {storable_name(key): str(value) for key, value in record.get("tags", {}).items()}
    if mesh := (record.get("plan") or {}).get("mesh"):
        tags["workers"] = str(recorded_mesh(mesh).num_workers)
    if precision := record.get("precision"):
        tags["precision"] = precision
    if color := _color(record):
        tags[COLOR] = color
    if sweep := record.get("sweep"):
        tags |= sweep_tags(sweep)
        if settings := sweep.get("settings"):
            tags[SETTINGS] = settings
    if restarts := (record.get("summary") or {}).get("restarts"):
        tags["recoveries"] = str(restarts)
    if record.get("state") == PRUNED:
        tags[PRUNED] = str(record.get("reason"))
    tags |= {f"mlflow.{key}": str(value) for key, value in (record.get("source") or {}).items()}
    if description := _description(record):
        tags[DESCRIPTION] = description
    return {key: storable_text(value, MAX_LENGTH) for key, value in tags.items()}


def run_name(record: Mapping[str, Any]) -> str:
    """Return the name of a run in MLflow: with its settings, in a sweep those in which it differs from the others."""
    settings = (record.get("sweep") or record).get("settings")
    evaluated = (record.get("evaluated") or {}).get("step")
    of_step = None if evaluated is None else f"(step {evaluated})"
    parts = [record["name"], settings, of_step, "(pruned)" if record.get("state") == PRUNED else None]
    return storable_text(" ".join(filter(None, parts)), MAX_NAME_LENGTH)


def _color(record: Mapping[str, Any]) -> str | None:
    """The color of a run: that of its strategy, or one of its own in a sweep over other settings."""
    sweep = record.get("sweep") or {}
    if not sweep.get("settings"):
        return _COLORS.get(str(record.get("strategy")))
    red, green, blue = colorsys.hls_to_rgb(int(sweep["run"]) * _HUE_STEP % 1, 0.42, 0.65)
    return f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}"


def sweep_tags(sweep: Mapping[str, str]) -> dict[str, str]:
    """Return the tags that the runs of a sweep and its own run share."""
    return {"sweep": storable_text(sweep["name"], MAX_LENGTH), SWEEP_ID: sweep["id"]}


def picture(run_id: str, path: str) -> str:
    """Return a link to the picture ``path`` among the artifacts of a run: shown in place, it would widen the page."""
    return f"[{path}](get-artifact?{urlencode({'path': path, 'run_uuid': run_id})})"


def shortened(text: str, length: int, *, rest_in: str) -> str:
    """Return the lines of ``text`` that fit into ``length`` characters; the artifact ``rest_in`` has all of it."""
    if len(text) <= length:
        return text
    rest = f"\n\nThe rest is in the artifact {rest_in}."
    return text[: length - len(rest)].rpartition("\n")[0] + rest


def _description(record: Mapping[str, Any]) -> str:
    """The end of the run in words, and its command."""
    command = code(storable_text(record["command"], MAX_LENGTH // 2)) if record.get("command") else ""
    words = shortened(record.get("description", ""), MAX_LENGTH - len(command) - 2, rest_in="auto.md")
    return "\n\n".join(filter(None, [words, command]))


_TAG = "mlflow.sharedViewState."
_CREATED_MS = 1_767_225_600_000  # a constant, so that the tag of a view changes only with its contents
_MAX_SWEEPS = 10
_MAX_NAME_LENGTH = 200
_MAIN_SECTION = "overview"
_OTHER_SECTIONS = (
    "summary",
    "train",
    "val",
    "perf",
    "memory",
    "pipeline",
    "parameter_server",
    "async",
    "hogwild",
    "dp",
    "recovery",
    "system/node_0",
    "Model metrics",
    "System metrics",
)
"""The groups of all other metrics; they are below the charts of a view, and closed."""


ALL_RUNS = f"tags.`{UID_TAG}` LIKE '%'"
"""A filter: the own run of a sweep, whose figures repeat another run's, would be a second bar in every chart."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart: a bar for the last value of ``metric`` in each run, or its lines over ``x``.

    ``x`` is ``time``, ``step`` or the name of a metric; None for bars.
    """

    metric: str
    x: str | None = None
    log_scale: bool = False


@dataclass(frozen=True, kw_only=True)
class View:
    """A saved view of the runs that ``filter`` selects.

    ``columns`` are tags and metrics, with the width of each in pixels.
    """

    id: str
    name: str
    order_by: str
    columns: Mapping[str, int]
    charts: tuple[Chart, ...]
    filter: str = ALL_RUNS
    created_ms: int = _CREATED_MS


COMPARE = View(
    id="compare",
    name="Compare strategies",
    order_by="metrics.`summary/samples_per_s`",
    columns={
        "tags.`strategy`": 140,
        "tags.`workers`": 80,
        "metrics.`summary/samples_per_s`": 180,
        "metrics.`summary/final_loss`": 140,
        "metrics.`summary/val_accuracy`": 165,
        "metrics.`summary/startup_s`": 140,
        "metrics.`summary/restarts`": 130,
        "tags.`sweep`": 220,
    },
    charts=(
        Chart(metric="summary/samples_per_s"),
        Chart(metric="train/loss", x="train/samples_seen", log_scale=True),
        Chart(metric="train/loss", x="time", log_scale=True),
        Chart(metric="summary/step_ms_p50"),
        *(Chart(metric=f"summary/{part}_ms") for part in ("compute", "comm", "data_wait", "idle")),
        Chart(metric="summary/peak_memory_mb"),
        Chart(metric="summary/samples_per_s_per_worker"),
        Chart(metric="summary/startup_s"),
        Chart(metric="summary/final_loss"),
        Chart(metric="val/accuracy", x="train/samples_seen"),
        Chart(metric="summary/restarts"),
    ),
)
"""Which strategy is fastest, does it learn the same, and what does another worker add?"""

HEALTH = View(
    id="health",
    name="Health of the runs",
    order_by="attributes.start_time",
    columns={
        "tags.`strategy`": 140,
        "tags.`workers`": 80,
        "metrics.`summary/restarts`": 140,
        "metrics.`summary/steps_lost`": 150,
        "metrics.`summary/effective_time_pct`": 200,
        "metrics.`summary/step_ms_p50`": 170,
        "metrics.`summary/step_ms_p95`": 170,
        "metrics.`summary/peak_memory_mb`": 190,
    },
    charts=(
        Chart(metric="perf/samples_per_s", x="time"),
        Chart(metric="perf/step_ms", x="time", log_scale=True),
        Chart(metric="perf/data_wait_pct", x="time"),
        Chart(metric="perf/comm_pct", x="time"),
        Chart(metric="perf/peak_memory_mb", x="time"),
        Chart(metric="train/grad_norm", x="step", log_scale=True),
        Chart(metric="recovery/seconds"),
        Chart(metric="recovery/num_workers", x="time"),
        Chart(metric="system/node_0/cpu_utilization_percentage", x="time"),
        Chart(metric="system/node_0/system_memory_usage_percentage", x="time"),
    ),
)
"""Did a run slow down, lose workers or run out of memory?"""

NOTE_BEGINS = "Runs of `orchestrator`. Charts: "
"""The begin of a description of ours; another one is the user's."""

VIEWS = (COMPARE, HEALTH)
_SWEEP = "sweep-"


def sweep_view(sweep_id: str, name: str, *, created_ms: int, has_settings: bool = False) -> View:
    """Return the view that compares the runs of one sweep.

    Args:
        sweep_id: the id of the sweep.
        created_ms: milliseconds since the epoch.
        has_settings: whether its runs differ in more than their names: a column shows that.
    """
    columns = {key: width for key, width in COMPARE.columns.items() if key != "tags.`sweep`"}
    if has_settings:
        columns = {f"tags.`{SETTINGS}`": 200, **columns}
    return replace(
        COMPARE,
        id=f"{_SWEEP}{sweep_id[:8]}",
        name=storable_text(name, _MAX_NAME_LENGTH),
        columns=columns,
        filter=f"tags.{SWEEP_ID} = '{sweep_id}' AND {ALL_RUNS}",
        created_ms=created_ms,
    )


def experiment_tags(views: Sequence[View] = VIEWS) -> dict[str, str]:
    """Return the tags of an experiment that hold ``views``."""
    return {f"{_TAG}{view.id}": _envelope(view) for view in views}


def obsolete_tags(tags: Mapping[str, str]) -> list[str]:
    """Return the names of the tags with the views of all but the newest sweeps: MLflow limits the number of views."""
    sweeps = [key for key in tags if key.startswith(_TAG + _SWEEP)]
    sweeps.sort(key=lambda key: json.loads(tags[key])["createdAt"], reverse=True)
    return sweeps[_MAX_SWEEPS - 1 :]


def note(experiment_id: str) -> str:
    """Return the description of an experiment: links to its views. Its links are relative to the page of MLflow."""
    links = " · ".join(f"[{view.name}]({page('.', experiment_id, view)})" for view in VIEWS)
    return f"{NOTE_BEGINS}{links}"


def page(server: str, experiment_id: str, view: View) -> str:
    """Return the address at which the web page of ``server`` shows the charts of ``view``."""
    query = f"viewStateShareKey={view.id}&compareRunsMode=CHART&workflowType=machine_learning"
    return f"{server}/#/experiments/{experiment_id}/runs?{query}"


def _envelope(view: View) -> str:
    state = json.dumps(_state(view), separators=(",", ":")).encode()
    packed = "deflate;" + base64.b64encode(zlib.compress(state, 9)).decode()
    return json.dumps({"name": view.name, "createdAt": view.created_ms, "updatedAt": view.created_ms, "state": packed})


def _state(view: View) -> dict[str, Any]:
    """What the page restores; what is not given has MLflow's defaults."""
    return {
        "searchFilter": view.filter,
        "orderByKey": view.order_by,
        "orderByAsc": False,
        "selectedColumns": list(view.columns),
        "columnOrder": list(view.columns),
        "columnWidths": dict(view.columns),
        "compareRunCharts": [_chart(chart, f"{view.id}-{i}") for i, chart in enumerate(view.charts)],
        "compareRunSections": [_section(_MAIN_SECTION, view.name, display=True)]
        + [_section(name, name, display=False) for name in _OTHER_SECTIONS],
        "isAccordionReordered": True,  # keep the order of the sections
    }


def _section(uuid: str, name: str, *, display: bool) -> dict[str, Any]:
    return {"uuid": uuid, "name": name, "display": display, "isReordered": True, "deleted": False, "isGenerated": False}


def _chart(chart: Chart, uuid: str) -> dict[str, Any]:
    card = {
        "uuid": uuid,
        "metricSectionId": _MAIN_SECTION,
        "metricKey": chart.metric,
        "selectedMetricKeys": [chart.metric],
        "runsCountToCompare": 10,
        "deleted": False,
        "isGenerated": False,
    }
    if chart.x is None:
        return {**card, "type": "BAR"}
    axis = {"time": "time-relative", "step": "step"}.get(chart.x, "metric")
    return {
        **card,
        "type": "LINE",
        "xAxisKey": axis,
        "selectedXAxisMetricKey": chart.x if axis == "metric" else "",
        "xAxisScaleType": "linear",
        "scaleType": "log" if chart.log_scale else "linear",
        "range": {},
        "yAxisKey": "metric",
        "yAxisExpressions": [],
        "lineSmoothness": 0,
        "ignoreOutliers": False,
        "useGlobalXaxisKey": False,
        "useGlobalLineSmoothing": True,
    }

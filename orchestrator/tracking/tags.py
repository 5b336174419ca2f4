"""The tags of a run in MLflow: what its page and the table of runs show beside the metrics. Pure."""

from __future__ import annotations

import colorsys
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from orchestrator.config.text import code
from orchestrator.planning.mesh import recorded_mesh
from orchestrator.records.storable_names import storable_name

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
    if record.get("state") == PRUNED:
        tags[PRUNED] = str(record.get("reason"))
    tags |= {f"mlflow.{key}": str(value) for key, value in (record.get("source") or {}).items()}
    if description := _description(record):
        tags[DESCRIPTION] = description
    return {key: value[:MAX_LENGTH] for key, value in tags.items()}


def run_name(record: Mapping[str, Any]) -> str:
    """Return the name of a run in MLflow: with the settings in which it differs from others of its sweep."""
    settings = (record.get("sweep") or {}).get("settings")
    parts = [record["name"], settings, "(pruned)" if record.get("state") == PRUNED else None]
    return " ".join(filter(None, parts))[:MAX_NAME_LENGTH]


def _color(record: Mapping[str, Any]) -> str | None:
    """The color of a run: that of its strategy, or one of its own in a sweep over other settings."""
    sweep = record.get("sweep") or {}
    if not sweep.get("settings"):
        return _COLORS.get(str(record.get("strategy")))
    red, green, blue = colorsys.hls_to_rgb(int(sweep["run"]) * _HUE_STEP % 1, 0.42, 0.65)
    return f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}"


def sweep_tags(sweep: Mapping[str, str]) -> dict[str, str]:
    """Return the tags that the runs of a sweep and its own run share."""
    return {"sweep": sweep["name"][:MAX_LENGTH], SWEEP_ID: sweep["id"]}


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
    command = code(record["command"]) if record.get("command") else ""
    words = shortened(record.get("description", ""), MAX_LENGTH - len(command) - 2, rest_in="auto.md")
    return "\n\n".join(filter(None, [words, command]))

"""The tags of a run in MLflow: what its page and the table of runs show beside the metrics. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.records.journal import clean_name

SWEEP_ID = "sweep_id"
"""The tag of all runs of a sweep, and of the sweep's own run."""

DESCRIPTION = "mlflow.note.content"
COLOR = "mlflow.runColor"

_MAX_LENGTH = 5000
_COLORS = {
    "single": "#6b7280",
    "dp": "#7c3aed",
    "ddp": "#2272b4",
    "model_parallel": "#be123c",
    "pipeline": "#d97706",
    "ddp_pipeline": "#92400e",
    "parameter_server": "#15803d",
    "hogwild": "#0d9488",
    "locked_sgd": "#db2777",
}
"""The color of a strategy in every chart: MLflow's own colors depend on the id of a run, and may coincide."""


def run_tags(record: Mapping[str, Any]) -> dict[str, str]:
    """Return the tags of a run.

    Args:
        record: the contents of ``run.json``.
    """
    tags = {clean_name(key): str(value) for key, value in record.get("tags", {}).items()}
    if mesh := (record.get("plan") or {}).get("mesh"):
        tags["workers"] = str(mesh["data_parallel_size"] * mesh["pipeline_parallel_size"])
    if precision := record.get("precision"):
        tags["precision"] = precision
    if color := _COLORS.get(str(record.get("strategy"))):
        tags[COLOR] = color
    if sweep := record.get("sweep"):
        tags |= {"sweep": sweep["name"], SWEEP_ID: sweep["id"]}
    tags |= {f"mlflow.{key}": str(value) for key, value in (record.get("source") or {}).items()}
    command = f"`{record['command']}`" if record.get("command") else ""
    if description := "\n\n".join(text for text in (record.get("description"), command) if text):
        tags[DESCRIPTION] = description
    return {key: value[:_MAX_LENGTH] for key, value in tags.items()}

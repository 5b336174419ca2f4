"""How far a run is that has no summary yet, from the end of its journal."""

from __future__ import annotations

from typing import Any

from orchestrator.protocol.core_metrics import CORE_METRICS, SAMPLES_PER_S
from orchestrator.records.journal import OF_NO_ATTEMPT, read_points
from orchestrator.records.run_dir import RunDir

_TAIL_BYTES = 2**18
"""More than several points and readings of a large run, and little to read over a network."""


def progress_of(run_dir: RunDir) -> dict[str, float]:
    """Return what the summary of the run would contain now: ``steps``, the last losses, and the speed at the last step.

    It is empty if the run has logged nothing, or if its journal cannot be read. Only the end of the journal is read.
    """
    step, latest = 0, dict[str, float]()
    for at, _, metrics, _ in read_points(_tail(run_dir)):  # the first line may be incomplete
        if any(not name.startswith(OF_NO_ATTEMPT) for name in metrics):
            step = max(step, at)
            latest |= metrics
    found: dict[str, Any] = {"steps": step} if step else {}
    for spec in CORE_METRICS:
        for summary in spec.summaries:
            if spec.name in latest and (summary.derive == "last" or spec is SAMPLES_PER_S):
                found[summary.key] = latest[spec.name]
    return found


def _tail(run_dir: RunDir) -> bytes:
    file = run_dir.metrics_file
    try:
        if run_dir.remote is not None and not run_dir.is_original(run_dir.read_driver()):
            return run_dir.remote.read(file.name, last_bytes=_TAIL_BYTES)
        with file.open("rb") as journal:
            journal.seek(max(0, file.stat().st_size - _TAIL_BYTES))
            return journal.read()
    except (OSError, ValueError):  # ValueError: the record is damaged
        return b""

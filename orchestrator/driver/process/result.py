"""The result of a run, as :func:`orchestrator.run` returns it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from orchestrator.protocol.metrics import MetricSpec
from orchestrator.timeline.spans import Timeline


@dataclass(frozen=True, kw_only=True, repr=False)
class RunResult:
    """How a run ended.

    Attributes:
        status: ``"FINISHED"``, ``"FAILED"``, ``"KILLED"`` by a signal, or ``"PRUNED"`` by a search.
        exit_code: 0 finished or pruned, 1 failed, 2 failed before it trained because it no longer fits the cluster, 3
            finished but the last checkpoint is lost or records are not uploaded, 129, 130 or 143 killed by SIGHUP,
            SIGINT or SIGTERM.
        run_dir: the directory with the records, logs and checkpoints. If ``output_dir`` is a URL, this is the local
            directory from which they were uploaded; it has the files of this node.
        url: where the run is, if ``output_dir`` is a URL; None otherwise.
        reason: why the run ended; empty if it finished.
        summary: the last values of the metrics and the figures of the run: ``"final_loss"``, ``"val_loss"``,
            ``"val_<metric>"``, ``"steps"``, ``"samples_per_s"``, ``"startup_s"`` (seconds from the call to the first
            step), ``"waited_s"`` (seconds of it spent waiting for resources), ``"restarts"``, ``"mlflow_run_id"``, ...
            A metric without a value is missing.
        timeline: the last timed step of its pipeline stages; None if there are none.
        metrics: the declarations of the metrics that were logged.
    """

    status: Literal["FINISHED", "PRUNED", "FAILED", "KILLED"]
    exit_code: int
    run_dir: Path
    url: str | None = None
    reason: str = ""
    summary: Mapping[str, Any] = field(default_factory=dict)
    timeline: Timeline | None = None
    metrics: tuple[MetricSpec, ...] = ()

    def __repr__(self) -> str:
        """Return one line: the status, the reason if there is one, the results, and where the run is."""
        reason = [f"reason={self.reason!r}"] if self.reason else []
        keys = ("steps", "final_loss", *(key for key in self.summary if key.startswith("val_")))
        results = [f"{key}={value:.6g}" for key in keys if isinstance(value := self.summary.get(key), (int, float))]
        where = f"run_dir={self.url or str(self.run_dir)!r}"
        return f"RunResult({', '.join([self.status, *reason, *results, where])})"

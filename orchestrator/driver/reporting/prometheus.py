"""Metrics of a run for Prometheus, which the agent of Ray on the driver's node exports with Ray's own."""

from __future__ import annotations

import logging
import time

from ray.util.metrics import Gauge

from orchestrator.protocol.core_metrics import LOSS, SAMPLES_PER_S
from orchestrator.protocol.events import Event, GenerationStarted, MetricsLogged, RankProgress, RunStarted

NAMESPACE = "ray"
"""Ray exports each metric as ``ray_<name>``."""

GAUGES = {
    "orchestrator_loss": "training loss at the last logged step",
    "orchestrator_samples_per_s": "training samples per second, of all workers together",
    "orchestrator_step": "last logged step",
    "orchestrator_workers": "worker processes of the current generation",
    "orchestrator_restarts": "generations after the first one: recoveries and planned pauses since the launch",
}
"""The description of each metric by name."""

LABELS = ("run", "strategy", "job_name")
"""The labels of each metric. Prometheus itself sets a label ``job``."""

REFRESH_S = 1.0


class PrometheusSink:
    """An event sink that exports the newest values of a run.

    Ray exports a recorded value once, and drops it after two report intervals (20 s). Each value is therefore recorded
    again while the ranks report progress; a run that has ended disappears from the export. A Ray without metrics
    collection, such as the embedded one, ignores the values.
    """

    def __init__(self) -> None:
        self._gauges: dict[str, Gauge] = {}
        self._labels: dict[str, str] = {}
        self._values: dict[str, float] = {}
        self._refresh_at = 0.0
        self._error_logged = False

    def emit(self, event: Event) -> None:
        """Export what ``event`` says."""
        try:
            self._emit(event)
        except Exception:
            if not self._error_logged:  # once, to keep a broken export from flooding the log
                self._error_logged = True
                logging.getLogger(__name__).exception("the Prometheus metrics cannot be exported")

    def close(self) -> None:
        """Do nothing: Ray drops the values."""

    def _emit(self, event: Event) -> None:
        match event:
            case RunStarted():
                self._labels = {"run": event.name, "strategy": event.strategy, "job_name": event.job}
                self._gauges = {name: Gauge(name, text, tag_keys=LABELS) for name, text in GAUGES.items()}
            case GenerationStarted():
                self._record(orchestrator_workers=len(event.workers), orchestrator_restarts=event.generation - 1)
            case MetricsLogged() if LOSS.name in event.metrics:
                self._record(orchestrator_loss=event.metrics[LOSS.name], orchestrator_step=event.step)
                if SAMPLES_PER_S.name in event.metrics:  # the first point has no speed
                    self._record(orchestrator_samples_per_s=event.metrics[SAMPLES_PER_S.name])
            case RankProgress() if time.monotonic() >= self._refresh_at:
                self._record()

    def _record(self, **values: float) -> None:
        """Record all values, of which ``values`` are new."""
        self._values |= values
        self._refresh_at = time.monotonic() + REFRESH_S
        for name, value in self._values.items():
            self._gauges[name].set(value, tags=self._labels)

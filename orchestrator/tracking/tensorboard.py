"""TensorBoard: event files of scalars, parameters, texts and images. Imports torch when a sink is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrator.protocol.metrics import summary_value
from orchestrator.records.journal import Sample
from orchestrator.tracking.backend import Point


class TensorBoard:
    """The :class:`~orchestrator.tracking.sinks.TrackingSink` that writes event files into ``folder``."""

    def __init__(self, run: Mapping[str, Any], folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        writer: Any = SummaryWriter
        # A page that is open forgets what an earlier process has written.
        self._writer = writer(str(folder), purge_step=0)
        self._params = {
            key: value if isinstance(value, (bool, int, float, str)) else str(value)
            for key, value in run.get("params", {}).items()
        }

    def log_points(self, points: Sequence[Point]) -> None:
        for point in points:
            self._writer.add_scalar(point.name, point.value, point.step, walltime=point.time)
        self._writer.flush()

    def log_sample(self, sample: Sample) -> None:
        """An image or a text; the numbers of histograms (``.json``) stay in the run directory."""
        name, step, time = sample.name, sample.step, sample.time
        if sample.path.suffix == ".png":
            import numpy as np
            from PIL import Image

            with Image.open(sample.path) as image:
                pixels = np.asarray(image.convert("RGB"))
            self._writer.add_image(name, pixels, step, walltime=time, dataformats="HWC")
        elif sample.path.suffix == ".txt":
            self._writer.add_text(name, sample.path.read_text(errors="replace"), step, walltime=time)
        self._writer.flush()

    def close(self, status: str, summary: Mapping[str, Any]) -> None:
        """Write the parameters, with the numbers of the summary as their results."""
        results = {f"summary/{key}": v for key in summary if (v := summary_value(summary, key)) is not None}
        self._writer.add_hparams({**self._params, "status": status}, results, run_name=".")
        self._writer.close()

"""A sink for Weights & Biases: ``tracking.sinks=[wandb_sink.WandbSink]``; ``wandb sync`` uploads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import wandb


class WandbSink:
    """Writes a run of Weights & Biases into ``folder``, which needs no network."""

    def __init__(self, run: Mapping[str, Any], folder: Path) -> None:
        self._run = wandb.init(
            mode="offline",
            dir=folder,
            id=run["uid"],
            name=run["name"],
            project=run["tracking"]["experiment"],
            config=dict(run["params"]),
        )

    def log_points(self, points: Sequence[Any]) -> None:
        for point in points:
            self._run.log({point.name: point.value, "step": point.step})

    def log_sample(self, sample: Any) -> None:
        text = sample.path.suffix != ".png"
        shown = wandb.Html(f"<pre>{sample.path.read_text()}</pre>") if text else wandb.Image(str(sample.path))
        self._run.log({f"samples/{sample.name}": shown, "step": sample.step})

    def close(self, status: str, summary: Mapping[str, Any]) -> None:
        self._run.summary.update({key: value for key, value in summary.items() if isinstance(value, int | float)})
        self._run.finish(exit_code=status not in ("FINISHED", "PRUNED"))

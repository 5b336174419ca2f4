"""States to save, and what no search for a checkpoint may report."""

from __future__ import annotations

import torch

from orchestrator.state.manifest import CheckpointError
from orchestrator.state.train_state import TrainState


def make_state(step: int, *, megabytes: float = 0.1) -> TrainState:
    numbers = int(megabytes * 1e6 / 4)
    return TrainState(
        model={"w": torch.full((numbers,), float(step)), "b": torch.arange(3)},
        optimizer={"w/step": torch.tensor(float(step))},
        meta={"step": step, "samples_consumed": step * 10, "note": "x" * 10},
    )


def never(error: CheckpointError) -> None:
    raise AssertionError(f"reported as damaged: {error}")

"""States to save, and what no search for a checkpoint may report."""

import torch

from orchestrator.state.best import BEST, BestSoFar
from orchestrator.state.manifest import CheckpointError
from orchestrator.state.train_state import TrainState


def best_at(step: int) -> BestSoFar:
    """The best evaluation so far, after ``step``; later ones are better."""
    return BestSoFar(metric="val/loss", direction="minimize").after(step, 1 / step, min_delta=0)


def make_state(step: int, *, megabytes: float = 0.1, best: int | None = None) -> TrainState:
    """A state; ``best``: the step of the best evaluation so far, if there is one."""
    numbers = int(megabytes * 1e6 / 4)
    return TrainState(
        model={"w": torch.full((numbers,), float(step)), "b": torch.arange(3)},
        optimizer={"w/step": torch.tensor(float(step))},
        meta={
            "step": step,
            "samples_consumed": step * 10,
            "note": "x" * 10,
            **({} if best is None else {BEST: best_at(best).to_json()}),
        },
    )


def never(error: CheckpointError) -> None:
    raise AssertionError(f"reported as damaged: {error}")

"""An exponential moving average of the weights, ``train.ema_decay``.

The average of a parameter is a part of its optimizer state, so that checkpoints, copies for recovery and the state that
pipeline stages exchange have it like every other part. Polyak and Juditsky, SIAM J. Control Optim. 1992, "Acceleration
of Stochastic Approximation by Averaging", with exponential weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.swa_utils import get_ema_multi_avg_fn

from orchestrator.model.precision import summable
from orchestrator.state.optimizers import AVERAGE, AnyOptimizer
from orchestrator.state.train_state import TrainState


def keep_average(optimizer: Optimizer, decay: float) -> None:
    """Let each update of ``optimizer`` also update the average: ``decay * average + (1 - decay) * weight``.

    The average of a parameter begins as its value after its first update. That of a parameter with 16 bits has 32, also
    if a checkpoint has fewer: in 16 bits, the small changes of an average are rounded away.
    """
    update_all = get_ema_multi_avg_fn(decay)

    @torch.no_grad()
    def update(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        averages: list[Tensor] = []
        weights: list[Tensor] = []
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if AVERAGE in optimizer.state.get(parameter, {}):
                average = optimizer.state[parameter][AVERAGE] = summable(optimizer.state[parameter][AVERAGE])
                if average.dtype == parameter.dtype:
                    averages.append(average)
                    weights.append(parameter)
                else:  # one by one, for memory
                    average.lerp_(parameter.to(average.dtype), 1 - decay)
            elif parameter.grad is not None:  # before, an entry would keep the optimizer from making its own
                optimizer.state[parameter][AVERAGE] = summable(parameter.detach().clone())
        if averages:
            update_all(averages, weights, 0)

    optimizer.register_step_post_hook(update)


@contextlib.contextmanager
def averaged(optimizer: AnyOptimizer) -> Iterator[None]:
    """Give the parameters the values of their averages, and their own values back at the end.

    Parameters without an average keep their values: they have not been updated. Needs memory for a copy of the others.
    """
    averages = {parameter: state[AVERAGE] for parameter, state in optimizer.state.items() if AVERAGE in state}
    own = [parameter.detach().clone() for parameter in averages]
    with torch.no_grad():
        for parameter, average in averages.items():
            parameter.copy_(average)
        try:
            yield
        finally:
            for parameter, value in zip(averages, own, strict=True):
                parameter.copy_(value)


def forget_average(state: TrainState) -> None:
    """Drop the averages of a loaded checkpoint, for a run that does not keep them up to date."""
    for path in [path for path in state.optimizer if path.rpartition("/")[2] == AVERAGE]:
        del state.optimizer[path]

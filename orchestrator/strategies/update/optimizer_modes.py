"""Optimizers with ``train()`` and ``eval()``, between which the parameters change, such as schedule-free ones.

A checkpoint has the weights of ``eval()``, because those are evaluated and exported, and as a part of the optimizer's
state those of ``train()``, so that a resume is exact. What ranks send each other stays in training mode.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from orchestrator.state.optimizer_state import optimizers_in
from orchestrator.state.optimizers import AnyOptimizer

MODE = "optimizer_mode"
"""The entry of ``meta`` of a state that was taken in evaluation mode."""
TRAINED = "param_train"
"""The key of the weights of ``train()`` in the optimizer state of a parameter."""


def with_modes(optimizer: AnyOptimizer) -> list[Any]:
    """Return the optimizers that have both modes."""
    methods = ("train", "eval")
    return [o for o in optimizers_in(optimizer) if all(callable(getattr(o, method, None)) for method in methods)]


def to_training(optimizer: AnyOptimizer) -> None:
    """Set optimizers that have modes to training."""
    for one in with_modes(optimizer):
        one.train()


@contextlib.contextmanager
def evaluation_weights(optimizer: AnyOptimizer) -> Iterator[None]:
    """Set optimizers that have modes to evaluation, and give the parameters exactly their own values at the end.

    Needs memory for a copy of the parameters.
    """
    modal = with_modes(optimizer)
    own = {p: p.detach().clone() for one in modal for group in one.param_groups for p in group["params"]}
    for one in modal:
        one.eval()
    try:
        for one in modal:
            for parameter in (p for group in one.param_groups for p in group["params"]):
                one.state[parameter][TRAINED] = own[parameter]
        yield
    finally:
        _take_back(modal)


@contextlib.contextmanager
def loading_in_mode(optimizer: AnyOptimizer, mode: Any) -> Iterator[None]:
    """Load a state in the mode in which it was taken, and go on in training mode.

    Args:
        optimizer: whose state and parameters are loaded.
        mode: what the state has as ``MODE``.
    """
    modal = with_modes(optimizer) if mode is not None else []
    for one in modal:
        one.eval()
    yield
    _take_back(modal)


@torch.no_grad()
def _take_back(modal: list[Any]) -> None:
    """Set optimizers to training, with exactly the weights that are in their state."""
    for one in modal:
        one.train()
        for parameter, values in list(one.state.items()):
            if isinstance(values, dict) and (own := values.pop(TRAINED, None)) is not None:
                parameter.copy_(own)
                if not values:  # the optimizer has not made its own yet
                    del one.state[parameter]

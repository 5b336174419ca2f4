"""Updates by an optimizer that asks for the loss and the gradients at several points, such as ``LBFGS``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from orchestrator.compat.torch import version_of
from orchestrator.config.schema import StrategyConfig, TrainConfig
from orchestrator.config.text import to_cli
from orchestrator.user_code.results import kind_of


class Closure:
    """Returns the loss of a step's batch at the present weights, and leaves its gradients.

    What an optimizer finds in its first call has been computed already, unless it has changed weights or gradients.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], loss: Tensor, again: Callable[[], Tensor]):
        """Begin with the ``loss`` whose gradients the parameters have; ``again``: adds new ones and returns theirs."""
        self._parameters = parameters
        self._again = again
        self._loss = loss
        self._versions = self._present()

    def __call__(self) -> Tensor:
        if self._present() != self._versions:
            for parameter in self._parameters:
                parameter.grad = None
            with torch.enable_grad():
                self._loss = self._again()
            self._versions = self._present()
        return self._loss

    def _present(self) -> list[tuple[int, int | None]]:
        return [(version_of(p), None if p.grad is None else version_of(p.grad)) for p in self._parameters]


def closure_errors(optimizer: Optimizer, train: TrainConfig, options: StrategyConfig) -> list[str]:
    """Return why the run cannot have an ``optimizer`` that needs a closure."""
    what = f"job.optimizer returns {kind_of(optimizer)}, whose step() needs a closure"
    if options.name not in ("single", "ddp"):
        return [
            f"strategy={options.name}: {what}, which needs the whole model on each worker; use strategy=single or "
            "strategy=ddp"
        ]
    powersgd = getattr(options, "comm_hook", "none") == "powersgd"
    refused = {
        "train.clip_norm": (train.clip_norm is not None, train.clip_norm, "null"),
        "train.clip_value": (train.clip_value is not None, train.clip_value, "null"),
        "train.precision": (train.precision == "fp16", "fp16", "fp32"),
        "train.on_nonfinite": (train.on_nonfinite == "skip", "skip", "stop"),
        "strategy.comm_hook": (powersgd, "powersgd", "none"),
    }
    return [
        f"{key}={to_cli(value)}: {what}, and compares gradients at several points, which this key would change; set it "
        f"to {remedy}"
        for key, (is_set, value, remedy) in refused.items()
        if is_set
    ]

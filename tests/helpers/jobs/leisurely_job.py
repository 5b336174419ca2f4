"""A job whose training steps take a while, so that something can happen meanwhile."""

import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from jobs.digits import Digits


@dataclass(frozen=True, kw_only=True)
class Leisurely(Digits):
    """Sleeps for ``pause_ms`` in each training step, as long as there is no file ``until``.

    With ``frozen``, the first layer is not trained.
    """

    hidden: int = 16
    pause_ms: float = 20.0
    until: str | None = None
    frozen: bool = False

    def model(self) -> nn.Module:
        model = super().model()
        model.get_submodule("hidden0").requires_grad_(not self.frozen)
        return model

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        if torch.is_grad_enabled() and not (self.until and Path(self.until).exists()):
            time.sleep(self.pause_ms / 1e3)
        return super().loss(output, target)

"""Jobs whose rank 1 sleeps in every step."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from jobs.digits import Digits


@dataclass(frozen=True, kw_only=True)
class Straggling(Digits):
    hidden: int = 16
    sleep_s: float = 0.03

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        if dist.get_rank() == 1:
            time.sleep(self.sleep_s)
        return super().loss(output, target)


@dataclass(frozen=True, kw_only=True)
class SlowProcess(Straggling):
    """Only the first process of rank 1 is slow; it writes its number into the file ``who``.

    The others sleep too, so that their times are long against the noise of a busy machine.
    """

    sleep_s: float = 0.06
    usual_s: float = 0.01
    who: str

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        path = Path(self.who)
        if dist.get_rank() == 1 and not path.exists():
            path.write_text(str(os.getpid()))
        if dist.get_rank() != 1 or path.read_text() != str(os.getpid()):
            time.sleep(self.usual_s)
            return Digits.loss(self, output, target)
        return super().loss(output, target)

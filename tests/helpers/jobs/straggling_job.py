"""Jobs whose rank 1 sleeps in every step after the warm-up, which no straggler is looked for in."""

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from jobs.digits import Digits

WARM_UP_STEPS = 10


@dataclass(frozen=True, kw_only=True)
class Straggling(Digits):
    """Its steps take half a second, so that a straggler is found after 20 of them."""

    hidden: int = 16
    sleep_s: float = 0.5
    usual_s: float = 0.05
    calls: list[int] = field(default_factory=lambda: [0], init=False, repr=False)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls[0] += 1
        if self.calls[0] > WARM_UP_STEPS:
            time.sleep(self.sleep_s if self.is_slow() else self.usual_s)
        return super().loss(output, target)

    def is_slow(self) -> bool:
        return dist.get_rank() == 1


@dataclass(frozen=True, kw_only=True)
class SlowProcess(Straggling):
    """Only the first process of rank 1 is slow; it writes its number into the file ``who``."""

    who: str

    def is_slow(self) -> bool:
        path = Path(self.who)
        if dist.get_rank() == 1 and not path.exists():
            path.write_text(str(os.getpid()))
        return dist.get_rank() == 1 and path.read_text() == str(os.getpid())

"""Jobs that say what they see of a GPU, or take too much of it."""

import os
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from jobs.digits import Digits

COMMUNICATOR_MB = 8
"""What may change outside of torch's allocator: less than a communicator of NCCL takes of a GPU."""


def outside_of_torch() -> int:
    """The bytes of the GPU that are in use, by any process, beside what torch's allocator has taken in this one."""
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


class Observing(Digits):
    """Measures the devices that a worker sees, whether it computes on one, and the memory of its tensors and beside."""

    def train_metrics(self, output: Tensor, target: Tensor) -> Mapping[str, Tensor]:
        values = {
            "visible_devices": torch.cuda.device_count(),
            "on_gpu": output.is_cuda,
            "allocated_mb": torch.cuda.memory_allocated() / 1e6,
            "outside_mb": outside_of_torch() / 1e6,
        }
        return {name: torch.tensor(len(target) * float(value)) for name, value in values.items()}


class Greedy(Digits):
    """Rank 1 asks for a petabyte."""

    def loss(self, output: Any, target: Any) -> Tensor:
        if dist.get_rank() == 1 and torch.is_grad_enabled():
            torch.empty(2**50, dtype=torch.uint8, device=output.device)
        return super().loss(output, target)


@dataclass(frozen=True, kw_only=True)
class FailingOnce(Digits):
    """Rank 1 fails once in the whole run, in its step ``at_step``.

    Args:
        how: a failed ``assert`` on the device, a kernel that goes on to ``spin``, too little ``memory``, or an
            exception while the process ``driver`` is ``silent``, stopped for ``silent_s``.
    """

    how: Literal["assert", "spin", "memory", "silent"]
    at_step: int = 13
    driver: int = 0
    silent_s: float = 15.0
    seen: list[int] = field(default_factory=lambda: [0], init=False, repr=False)

    def loss(self, output: Any, target: Any) -> Tensor:
        loss = super().loss(output, target)
        if torch.is_grad_enabled() and dist.get_rank() == 1:
            self.seen[0] += 1
            if self.seen[0] == self.at_step and not (mark := Path("has-failed")).exists():
                mark.touch()
                self._fail(loss.device)
        return loss

    def _fail(self, device: torch.device) -> None:
        if self.how == "assert":
            torch.zeros(1, device=device)[torch.tensor([7], device=device)]
        elif self.how == "spin":
            torch.cuda._sleep(2**62)
        elif self.how == "memory":
            torch.empty(2**50, dtype=torch.uint8, device=device)
        else:
            subprocess.Popen(["sh", "-c", f"sleep {self.silent_s}; kill -CONT {self.driver}"], start_new_session=True)
            os.kill(self.driver, signal.SIGSTOP)
            raise RuntimeError("the planted fault")

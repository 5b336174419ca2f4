"""A language model whose workers may take only so much memory."""

import re
import resource
from dataclasses import dataclass
from pathlib import Path

import ray
from torch import nn

from jobs.gpt import GPT


@dataclass(frozen=True, kw_only=True)
class LimitedGPT(GPT):
    """Lets a worker take ``limit_mb`` more memory than it has when it first builds the model; null: any."""

    limit_mb: int | None = None

    def model(self) -> nn.Module:
        if self.limit_mb is not None and _is_worker():
            soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
            if soft == resource.RLIM_INFINITY:
                resource.setrlimit(resource.RLIMIT_DATA, (_data_bytes() + self.limit_mb * 2**20, hard))
        return super().model()


def _is_worker() -> bool:
    return ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None


def _data_bytes() -> int:
    """The private memory of this process that can be written, as the limit counts it."""
    (kib,) = re.findall(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(kib) * 1024

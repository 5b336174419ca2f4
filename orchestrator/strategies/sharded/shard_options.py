"""The keys of every strategy that divides tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import nn

from orchestrator.config.build import option
from orchestrator.planning.memory import gathered_bytes
from orchestrator.strategies.sharded.wrapping import bytes_by_group
from orchestrator.strategies.transforms.options import TensorConfig


@dataclass(frozen=True, kw_only=True)
class ShardedConfig(TensorConfig):
    """How tensors are gathered."""

    wrap: Literal["auto"] | tuple[str, ...] = option(
        "modules that are gathered one by one; auto: the repeated blocks of the model; or the names of their classes, "
        "as in [Block]"
    )
    reshard_after_forward: bool = option(
        "free what the forward pass has gathered, and gather it again in the backward pass; false: keep it up to the "
        "end of the step, which takes memory for the whole model"
    )
    prefetch: int = option(
        "how many of the modules that are gathered one by one are gathered ahead of the one that runs; each takes "
        "memory for one more, and 0 takes least",
        minimum=0,
    )

    @property
    def gathers(self) -> bool:
        return True

    @property
    def offloads(self) -> bool:
        """Whether shards, their gradients and their optimizer state are in host memory."""
        return False

    def gathered_bytes(self, model: nn.Module, *, share: float) -> float:
        """Return the bytes that a worker has gathered at the same time, of a model without memory.

        Args:
            model: the model.
            share: the part of the bytes of its parameters that is gathered.
        """
        return gathered_bytes(
            bytes_by_group(model, self.wrap),
            keep_whole=not self.reshard_after_forward,
            ahead=self.prefetch,
            share=share,
        )

"""The keys of the dimensions along which workers compute the same samples together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from orchestrator.config.schema import StrategyConfig, option

Pairs = Literal["auto"] | tuple[str, ...]
"""What is divided: what is found, or pairs as ``q + k + v -> out``, with the names of layers in a block."""


@dataclass(frozen=True, kw_only=True)
class TensorConfig(StrategyConfig):
    """How the layers of blocks are divided."""

    tensor: int = option("workers that the linear layers of each block of the model are divided over", minimum=1)
    tensor_pairs: Literal["auto"] | tuple[str, ...] = option(
        "the linear layers of a block that are divided together; auto: what is found in the model; or their names, as "
        "in ['q + k + v -> out']"
    )
    sequence: bool = option(
        "whether each of the workers that divide a block computes only its own tokens between the divided layers"
    )

    def groups(self, num_workers: int, errors: list[str]) -> int:
        """Return how many groups of workers that compute together ``num_workers`` make; append an error for others."""
        if num_workers % self.tensor:
            fitting = (n * self.tensor for n in (num_workers // self.tensor, num_workers // self.tensor + 1) if n)
            errors.append(
                f"strategy.num_workers={num_workers}: not divisible by strategy.tensor={self.tensor}; set it to "
                f"{' or '.join(map(str, fitting))}"
            )
        return max(1, num_workers // self.tensor)

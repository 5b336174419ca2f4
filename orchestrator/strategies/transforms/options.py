"""The keys of the dimensions along which workers compute the same samples together."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from orchestrator.config.build import option
from orchestrator.config.schema import StrategyConfig

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

    @property
    def group_sizes(self) -> Mapping[str, int]:
        """The numbers of workers that compute the same samples together, by dimension."""
        return {"tensor": self.tensor}

    @property
    def group_size(self) -> int:
        """The product of :attr:`group_sizes`."""
        return math.prod(self.group_sizes.values())

    @property
    def group_keys(self) -> str:
        """What makes the groups, as typed on the command line."""
        sizes = {key: size for key, size in self.group_sizes.items() if size > 1}
        return " x ".join(f"strategy.{key}={size}" for key, size in sizes.items())

    def groups(self, num_workers: int, errors: list[str]) -> int:
        """Return how many groups of workers that compute together ``num_workers`` make; append an error for others."""
        size, (groups, rest) = self.group_size, divmod(num_workers, self.group_size)
        if rest:
            fitting = " or ".join(str(n * size) for n in (groups, groups + 1) if n)
            errors.append(
                f"strategy.num_workers={num_workers}: not divisible by {self.group_keys}; set it to {fitting}"
            )
        return max(1, groups)


@dataclass(frozen=True, kw_only=True)
class ContextConfig(TensorConfig):
    """How the tokens of a sample are divided."""

    context: int = option("workers that the tokens of each sample are divided over", minimum=1)

    @property
    def group_sizes(self) -> Mapping[str, int]:
        return {"context": self.context, **super().group_sizes}

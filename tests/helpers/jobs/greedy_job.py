"""A job that asks for more memory than there is if a worker has more than eight samples."""

from dataclasses import dataclass

import torch
from torch import Tensor

from helpers.jobs.toys import Toy


@dataclass(frozen=True, kw_only=True)
class Greedy(Toy):
    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        if len(output) > 8:
            torch.empty(2**50)
        return super().loss(output, target)

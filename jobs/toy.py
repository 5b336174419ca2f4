"""The small models of PyTorch's tutorials on parallelism, trained on random numbers.

The model of the ``DataParallel`` tutorial, with 5 inputs and 2 outputs, on 100 samples in batches of 30::

    python -m orchestrator.launch job=toy train.global_batch_size=30

The model of the ``DistributedDataParallel`` and model-parallel tutorials, with a hidden layer::

    python -m orchestrator.launch job=toy job.input_size=10 job.hidden=10 job.output_size=5 train.global_batch_size=20
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from orchestrator.job import Job, Split


@dataclass(frozen=True, kw_only=True)
class Toy(Job):
    """Regression on random inputs. The targets are a fixed linear map of the inputs, so that the loss can reach 0.

    ``hidden`` is the number of units in the hidden layer, 0 for a model without one.
    """

    input_size: int = 5
    output_size: int = 2
    hidden: int = 0
    samples: int = 100
    lr: float = 0.1

    def model(self) -> nn.Module:
        if not self.hidden:
            return nn.Sequential(OrderedDict(fc=nn.Linear(self.input_size, self.output_size)))
        return nn.Sequential(
            OrderedDict(
                net1=nn.Linear(self.input_size, self.hidden),
                relu=nn.ReLU(),
                net2=nn.Linear(self.hidden, self.output_size),
            )
        )

    def dataset(self, split: Split) -> Dataset[tuple[Tensor, ...]]:
        random = torch.Generator().manual_seed(0)
        linear_map = torch.randn(self.input_size, self.output_size, generator=random)
        inputs = torch.randn(2, self.samples, self.input_size, generator=random)[int(split == "val")]
        return TensorDataset(inputs, inputs @ linear_map)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=self.lr)

    def check(self) -> None:
        for name, least in (("input_size", 1), ("output_size", 1), ("hidden", 0), ("samples", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"job.{name}={getattr(self, name)}: must be at least {least}")
        if self.lr <= 0:
            raise ValueError(f"job.lr={self.lr:g}: must be greater than 0")

"""Classify handwritten digits with a small MLP. The smallest complete job: copy this file to write your own.

    python -m orchestrator.launch job=digits strategy=ddp job.hidden=1024

A job in a file of your own needs no registration. For a class ``MyJob`` in ``my_package.py`` run

    python -m orchestrator.launch job._target_=my_package.MyJob job.hidden=64
"""

from __future__ import annotations

import gzip
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from orchestrator.job import Job, Split

PIXELS, CLASSES = 64, 10
MAX_BRIGHTNESS = 16


@dataclass(frozen=True, kw_only=True)
class Digits(Job):
    """1797 images of 8 x 8 pixels from scikit-learn, a random fifth of which is held out for evaluation.

    The fields are the job's configuration. ``job.hidden=1024`` on the command line sets ``hidden``, checked against the
    type of its annotation.
    """

    hidden: int = 512  # units of each hidden layer
    depth: int = 2  # number of hidden layers
    lr: float = 0.1
    momentum: float = 0.9

    def model(self) -> nn.Module:
        # An nn.Sequential of named layers: a pipeline can be cut between any two of them.
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        width = PIXELS
        for i in range(self.depth):
            layers[f"hidden{i}"] = nn.Linear(width, self.hidden)
            layers[f"relu{i}"] = nn.ReLU()
            width = self.hidden
        layers["head"] = nn.Linear(width, CLASSES)
        return nn.Sequential(layers)

    def dataset(self, split: Split) -> Dataset[tuple[Tensor, int]]:
        images, labels = load_digits()
        # The split does not depend on the run's seed, so that runs with different seeds can be compared.
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        held_out = len(labels) // 5
        chosen = order[:held_out] if split == "val" else order[held_out:]
        return Images(images[chosen], labels[chosen])

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=self.lr, momentum=self.momentum)

    def metrics(self, output: Tensor, target: Tensor) -> Mapping[str, Tensor]:
        # A sum over samples: the orchestrator divides it by their number and logs val/accuracy.
        return {"accuracy": (output.argmax(dim=-1) == target).sum()}

    def check(self) -> None:
        # Called before anything starts. An error names the field as typed on the command line.
        if self.hidden < 1 or self.depth < 1:
            raise ValueError(f"job.hidden={self.hidden}, job.depth={self.depth}: must be at least 1")
        if self.lr <= 0:
            raise ValueError(f"job.lr={self.lr:g}: must be greater than 0")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"job.momentum={self.momentum:g}: must be in [0, 1)")


class Images(Dataset[tuple[Tensor, int]]):
    """Items ``(image, label)``: float32 of shape (64,) in [0, 1], and an int from 0 to 9."""

    def __init__(self, images: Tensor, labels: Tensor):
        self.items = list(zip(images.unbind(), labels.tolist(), strict=True))

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.items[index]


def load_digits() -> tuple[Tensor, Tensor]:
    """Load the images, float32 of shape (1797, 64) in [0, 1], and their labels, int64 of shape (1797,)."""
    spec = find_spec("sklearn")
    origin = spec.origin if spec else None
    file = Path(origin or "").parent / "datasets" / "data" / "digits.csv.gz"
    if file.is_file():  # reading the file takes milliseconds, importing scikit-learn seconds
        with gzip.open(file, "rt") as lines:
            table = np.loadtxt(lines, delimiter=",", dtype=np.float32)
        images, labels = table[:, :PIXELS], table[:, PIXELS]
    else:
        from sklearn import datasets

        images, labels = datasets.load_digits(return_X_y=True)
    pixels = torch.as_tensor(images, dtype=torch.float32) / MAX_BRIGHTNESS
    return pixels, torch.as_tensor(labels, dtype=torch.int64)

"""Classify handwritten digits: ``digits_script.py`` as a job.

    python -m orchestrator.launch strategy=ddp job._target_=digits_job.Digits \
        train.steps=250 train.global_batch_size=60 train.clip_norm=1 train.eval_every=25
"""

from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from orchestrator import Job


@dataclass(frozen=True, kw_only=True)
class Digits(Job):
    width: int = 8
    lr: float = 0.05

    def model(self):
        width = self.width
        return nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(2 * width * 16, 10),
        )

    def dataset(self, split):
        data = load_digits()
        images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
        chosen = slice(0, 1500) if split == "train" else slice(1500, None)
        return TensorDataset(images[chosen], torch.tensor(data.target)[chosen])

    def loss(self, output, target):
        return F.cross_entropy(output, target)

    def metrics(self, output, target):
        return {"accuracy": (output.argmax(dim=-1) == target).sum()}

    def optimizer(self, parameters):
        return torch.optim.SGD(parameters, lr=self.lr, momentum=0.9)

    def scheduler(self, optimizer, steps):
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)


class InScriptOrder(Digits):
    """The samples in the order of the script, to compare the two curves step by step."""

    def dataset(self, split):
        dataset = super().dataset(split)
        return Shuffled(dataset) if split == "train" else dataset


class Shuffled(IterableDataset):
    """The samples one by one, as ``DataLoader(dataset, batch_size, shuffle=True, generator=order)`` draws them."""

    def __init__(self, dataset, seed=0):
        order = torch.Generator().manual_seed(seed)
        self.loader = DataLoader(dataset, batch_size=None, shuffle=True, generator=order)

    def __iter__(self):
        return iter(self.loader)

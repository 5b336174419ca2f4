"""Methods of a job whose targets are numbers of classes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import MultiStepLR

import orchestrator
from helpers.jobs.toys import Toy

__all__ = ["MultiStepLR", "cross_entropy", "orchestrator", "torch"]


@dataclass(frozen=True, kw_only=True)
class Example(Toy):
    """A small network."""

    # the example

"""Samples of a job to try a division of tokens with, and which of their axes has the tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from orchestrator.compat.generators import drawing
from orchestrator.job import Job
from orchestrator.model.batch import map_tensors, rows_between, split_batch, tensors_in
from orchestrator.strategies.data.datasets import example_batch, make_batch

ROWS = 2
"""The samples of a pass."""


def real_samples(job: Job, train_set: Any) -> list[tuple[Any, Any]]:
    """Return the inputs and targets of two batches, of different samples if the data has them."""
    with drawing(0):
        try:
            size = len(train_set)
            items = [train_set[i * size // (2 * ROWS)] for i in range(2 * ROWS)]
            inputs, target = split_batch(make_batch(job.collate, items))
        except Exception:
            return [example_batch(job, train_set, ROWS)] * 2
    halves = [(first * ROWS, (first + 1) * ROWS) for first in range(2)]
    return [(rows_between(inputs, *rows), rows_between(target, *rows)) for rows in halves]


@dataclass(frozen=True)
class TokenLength:
    """Which tensors of a batch have the tokens of samples.

    Attributes:
        number: the first of them, among the tensors of the inputs.
        length: their number.
        integers: whether tensors of integers have; None: all.
    """

    number: int
    length: int
    integers: bool | None = None

    def first(self, tree: Any, tokens: int) -> Any:
        """Return samples with their first tokens, or with some of them again if they have fewer."""

        def cut(tensor: Tensor) -> Tensor:
            if tensor.ndim < 2 or tensor.shape[1] != self.length:
                return tensor
            if self.integers is not None and tensor.is_floating_point() == self.integers:
                return tensor
            return tensor[:, :tokens] if tokens <= self.length else torch.cat([tensor, tensor], dim=1)[:, :tokens]

        return map_tensors(cut, tree)


def token_lengths(inputs: Any) -> Iterator[TokenLength]:
    """Yield what may be the tokens of samples: the second axis of tensors, those of numbers of words first."""
    tensors = [(i, t) for i, t in enumerate(tensors_in(inputs)) if 2 <= t.ndim <= 3 and t.shape[1] > 1]
    integers = [(i, t) for i, t in tensors if not t.is_floating_point()]
    floats = [(i, t) for i, t in tensors if t.is_floating_point() and t.ndim == 3]
    seen: set[int] = set()
    for number, tensor in [*integers, *floats]:
        if (length := tensor.shape[1]) in seen:
            continue
        seen.add(length)
        yield TokenLength(number, length)
        if any(t.shape[1] == length for _, t in integers) and any(t.shape[1] == length for _, t in floats):
            yield TokenLength(number, length, integers=True)

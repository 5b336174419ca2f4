"""A job that is healthy and slow: some batches take far longer than the others."""

import time
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Dataset

from jobs.digits import Digits
from orchestrator.job import Split


@dataclass(frozen=True, kw_only=True)
class Stalling(Digits):
    """Sample 0 of the validation set takes ``val_s`` to read, and the first sample of the training set ``train_s``."""

    hidden: int = 16
    val_s: float = 0.0
    train_s: float = 0.0

    def dataset(self, split: Split) -> Dataset[Any]:
        return _SlowToRead(
            super().dataset(split), self.val_s if split == "val" else self.train_s, once=split == "train"
        )


class _SlowToRead(Dataset[Any]):
    """A dataset that sleeps for ``pause_s`` before sample 0; with ``once``, before the first sample that is read."""

    def __init__(self, inner: Dataset[Any], pause_s: float, *, once: bool):
        self.inner, self.pause_s, self.once = inner, pause_s, once

    def __len__(self) -> int:
        return len(self.inner)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        if self.once or index == 0:
            time.sleep(self.pause_s)
        if self.once:
            self.pause_s = 0.0
        return self.inner[index]

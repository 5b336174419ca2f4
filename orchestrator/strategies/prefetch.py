"""Batches that are copied to the GPU while the step before computes.

Only batches of loader processes are read ahead. Without them, the dataset may draw from the random generator of the
training thread, which is seeded for each step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import Any

from orchestrator.strategies.side_stream import BeginCopy


def prefetched(batches: Generator[Any, None, None], begin_copy: BeginCopy) -> Generator[Any, None, None]:
    """Yield copies of ``batches``. The copy of each has begun when the one before is yielded.

    An error in reading a batch is raised in its turn, after the batch before it.
    """

    def next_copy() -> Callable[[], Any] | None:
        try:
            return begin_copy(next(batches))
        except StopIteration:
            return None
        except Exception as e:
            return _raising(e)

    with contextlib.closing(batches):
        copy = next_copy()
        while copy is not None:
            batch = copy()
            copy = next_copy()
            yield batch
            del batch  # so that no more than two batches are in the memory of the device


def _raising(error: Exception) -> Callable[[], Any]:
    def use() -> Any:
        raise error

    return use

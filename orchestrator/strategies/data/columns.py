"""Samples in columns, as a table has them: a batch of them needs no object for each sample."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, overload

import numpy as np
import torch
from torch.utils.data import default_collate


class Columns(Sequence[dict[str, Any]]):
    """Samples as arrays, one for each column. A sample is a dict of the values of the columns.

    Args:
        columns: the arrays.
        are_own: whether nobody else has them.
    """

    def __init__(self, columns: Mapping[str, np.ndarray[Any, Any]], *, are_own: bool = False):
        self.columns = dict(columns)
        self._are_own = are_own

    def __len__(self) -> int:
        return next((len(column) for column in self.columns.values()), 0)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> Columns: ...
    def __getitem__(self, index: Any) -> Any:
        chosen = {name: column[index] for name, column in self.columns.items()}
        return Columns(chosen, are_own=self._are_own) if isinstance(index, slice) else chosen

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[i] for i in range(len(self)))

    def rows(self, chosen: Any) -> Columns:
        """Return the samples that an array of numbers, or a slice, chooses."""
        return Columns({name: column[chosen] for name, column in self.columns.items()})

    def own(self) -> Columns:
        """Return a copy, unless these are one. Columns may share memory with other processes, which read the same."""
        if self._are_own:
            return self
        return Columns({name: np.array(column) for name, column in self.columns.items()}, are_own=True)

    def padded(self, rows: int) -> Columns:
        """Return the samples with the last one repeated until there are ``rows``."""
        return self.rows(np.minimum(np.arange(rows), len(self) - 1))

    def batch(self) -> dict[str, Any]:
        """Return the batch that torch makes of the samples: tensors of the types of the columns."""
        return {
            name: torch.from_numpy(column) if column.dtype.kind in "biufc" else default_collate(list(column))
            for name, column in self.own().columns.items()
        }


def joined(parts: Sequence[Sequence[Any]]) -> Any:
    """Return the samples of consecutive parts, all of them lists or all of them :class:`Columns`.

    Raises:
        ValueError: they differ in their columns.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    if not isinstance(first, Columns):
        return [item for part in parts for item in part]
    tables = [part.columns for part in parts if isinstance(part, Columns)]
    return Columns({name: _concatenated([table[name] for table in tables]) for name in first.columns})


def _concatenated(arrays: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    if len({array.shape[1:] for array in arrays}) == 1:
        return np.concatenate(arrays)
    whole = np.empty(sum(map(len, arrays)), dtype=object)  # samples of several shapes
    whole[:] = [value for array in arrays for value in array]
    return whole

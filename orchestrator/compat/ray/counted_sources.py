"""Sources of datasets of Ray Data whose rows are counted unread, and what is left of them without their first rows.

The plans and sources are private, and were read in Ray 2.60. If Ray moves them, rows are read and dropped in place of
being skipped. A dataset of the user is left as it is, because it may be read again, in another epoch.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import ray

PIECES = 8
"""The pieces of the file in which reading begins, and of the next one, as far as they have so many row groups."""
_KEEPS_ROWS = ("MapRows", "MapBatches", "Project", "Download")
"""The operators that return a row for each row. Of ``MapBatches``, this is presumed, and the caller compares rows."""


def known_count(dataset: Any) -> int | None:
    """Return the number of rows as far as the source tells; None if it would have to be computed."""
    source = _source(dataset)
    return None if source is None or not keeps_count(dataset) else sum(source.counts())


def has_counts(dataset: Any) -> bool:
    """Return whether the source counts its rows, so that :func:`without_first` may leave some out."""
    return _source(dataset) is not None


def keeps_count(dataset: Any) -> bool:
    """Return whether it is known that each row of the source makes one row."""
    return all(getattr(operator, "can_modify_num_rows", True) is False for operator in operators(dataset)[:-1])


def without_first(dataset: Any, rows: int) -> tuple[Any, int]:
    """Leave out the first rows, as far as whole files, row groups or blocks can be left out unread.

    Returns:
        The dataset, and how many rows it lacks: ``rows`` at most.
    """
    source = _source(dataset) if rows else None
    if source is None:
        return dataset, 0
    counts, units, skipped = source.counts(), 0, 0
    while units < len(counts) - 1 and skipped + counts[units] <= rows:
        skipped += counts[units]
        units += 1
    left, more = source.after(units, rows - skipped)
    if not skipped + more:
        return dataset, 0
    from ray.data import Dataset

    plan = dataset._logical_plan
    dag = plan.dag._apply_transform(lambda operator: left if operator is source.operator else operator)
    return Dataset._from_parent(dataset, type(plan)(dag, dataset.context)), skipped + more


def operators(dataset: Any) -> list[Any]:
    """Return the operators of a dataset from the last one to its source; only the last one if there are branches."""
    found = [dataset._logical_plan.dag]
    while len(inputs := found[-1].input_dependencies) == 1:
        found.append(inputs[0])
    return found if not found[-1].input_dependencies else found[:1]


class _Blocks:
    """Blocks that are in the object store, as of ``from_arrow``."""

    def __init__(self, operator: Any):
        self.operator = operator

    def counts(self) -> list[int]:
        """Return the number of rows of each unit: here, of each block."""
        return [bundle.num_rows() for bundle in self.operator.input_data]

    def after(self, units: int, rows: int) -> tuple[Any, int]:
        """Return an operator without the first units, and how many rows it lacks of the next: ``rows`` at most."""
        left = copy.copy(self.operator)
        left.__dict__.pop("_cached_output_metadata", None)
        object.__setattr__(left, "input_data", self.operator.input_data[units:])
        return left, 0


class _Files(_Blocks):
    """Files with one row each, such as images."""

    def counts(self) -> list[int]:
        source = self.operator.datasource
        return [source._rows_per_file()] * len(source._paths())

    def after(self, units: int, rows: int) -> tuple[Any, int]:
        source = copy.copy(self.operator.datasource)
        source._paths_ref, source._file_sizes_ref = map(
            ray.put, (source._paths()[units:], source._file_sizes()[units:])
        )
        return _reading(self.operator, source), 0


class _Parquet(_Blocks):
    """Files of parquet, whose footers have the number of rows of each row group."""

    def counts(self) -> list[int]:
        fragments = self.operator.datasource._pq_fragments
        with ThreadPoolExecutor(16) as pool:
            return list(pool.map(lambda fragment: int(fragment.original.metadata.num_rows), fragments))

    def after(self, units: int, rows: int) -> tuple[Any, int]:
        source = copy.copy(self.operator.datasource)
        first, *others = source._pq_fragments[units:]
        metadata = first.original.metadata
        number = skipped = 0
        while number < metadata.num_row_groups - 1 and (count := metadata.row_group(number).num_rows) <= rows - skipped:
            skipped += count
            number += 1
        soon = [*_pieces(first, number), *(piece for fragment in others[:1] for piece in _pieces(fragment, 0))]
        source._pq_fragments = soon + others[1:]
        source._pq_paths = [fragment.original.path for fragment in source._pq_fragments]
        return _reading(self.operator, source), skipped


class _RowGroups:
    """Some row groups of a parquet file, in the place of the whole one. Nothing is read to pickle it."""

    def __init__(self, fragment: Any, groups: Sequence[int], file_size: int):
        whole = fragment.original
        self.file_size = file_size
        self.original = whole.format.make_fragment(
            whole.path, whole.filesystem, whole.partition_expression, row_groups=list(groups)
        )
        self._remake: tuple[Callable[..., Any], tuple[Any, ...]] = (_RowGroups, (fragment, list(groups), file_size))

    def __reduce__(self) -> Any:
        return self._remake


def _pieces(fragment: Any, first: int) -> list[_RowGroups]:
    """Return the row groups of a file from ``first`` on in several pieces, for short tasks."""
    groups = range(first, fragment.original.metadata.num_row_groups)
    each = math.ceil(len(groups) / PIECES) or 1
    parts = [groups[at : at + each] for at in range(0, len(groups), each)]
    pieces = [_RowGroups(fragment, part, fragment.file_size * len(part) // groups.stop) for part in parts]
    return pieces or [fragment]


def _reading(operator: Any, source: Any) -> Any:
    return replace(operator, datasource=source, datasource_or_legacy_reader=source)


def _source(dataset: Any) -> _Blocks | None:
    """Return the source of a dataset if it counts rows, and has a row for each row of the dataset; None otherwise."""
    try:
        *further, first = operators(dataset)
        if any(type(operator).__name__ not in _KEEPS_ROWS for operator in further):
            return None
        if (bundles := getattr(first, "input_data", None)) is not None:
            return None if any(bundle.num_rows() is None for bundle in bundles) else _Blocks(first)
        source = getattr(first, "datasource", None)
        if source is None or source._shuffle is not None:
            return None
        if type(source).__name__ == "ParquetDatasource":
            drops = source._predicate_expr is not None or source._block_udf or "filter" in source._scanner_kwargs
            return None if drops else _Parquet(first)
        return _Files(first) if source._rows_per_file() is not None else None
    except (AttributeError, ValueError):
        return None

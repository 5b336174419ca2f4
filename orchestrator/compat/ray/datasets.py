"""Ray Data as the feeder uses it: rows in one order, from any row, as references to blocks.

Ray Data is imported with the first dataset. Its plans and its parquet source are private, and were read in Ray 2.60. If
Ray moves them, rows are read and dropped in place of being skipped.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray

_KEEPS_ROWS = ("MapRows", "MapBatches", "Project", "Download")
"""The operators that return a row for each row. Of ``MapBatches``, this is presumed, and the caller compares rows."""


@dataclass(frozen=True)
class Block:
    """A block of rows in the object store."""

    ref: Any
    first: int
    rows: int
    schema: str
    num_bytes: int


@contextlib.contextmanager
def in_order() -> Iterator[None]:
    """Let the datasets that are made in this context give their rows in the order of their source.

    The parquet source of old is used, because the new one packs row groups of several files into tasks by size.
    """
    os.environ["RAY_DATA_USE_DATASOURCE_V2"] = "0"  # if it is not imported yet
    if "ray.data" not in sys.modules:
        yield
        return
    context = sys.modules["ray.data"].DataContext.get_current()
    before = getattr(context, "use_datasource_v2", None)
    if before is not None:
        context.use_datasource_v2 = False
    try:
        yield
    finally:
        if before is not None:
            context.use_datasource_v2 = before


def prepare(dataset: Any, *, cpus: float | None, execution: int) -> None:
    """Let a dataset give its rows in order.

    Args:
        dataset: the dataset, which has not been executed.
        cpus: the most CPUs that its tasks may use at a time; None for all that are free.
        execution: counts the executions of this dataset, of which shuffles with a seed draw.
    """
    from ray.data import ExecutionResources

    options = dataset.context.execution_options
    options.preserve_order = True
    if cpus is not None:
        options.resource_limits = ExecutionResources(cpu=cpus)
    dataset.context.enable_progress_bars = False
    dataset.context._execution_idx = execution


def unseeded_operator(dataset: Any) -> str | None:
    """Return the operator that draws another order in each execution; None if there is none."""
    for operator in _operators(dataset):
        config = getattr(operator, "seed_config", None)
        if config is not None and config.seed is None:
            return {"RandomShuffle": "random_shuffle", "RandomizeBlocks": "randomize_block_order"}.get(
                type(operator).__name__, "random_sample"
            )
        shuffle = getattr(getattr(operator, "datasource", None), "_shuffle", None)
        if shuffle is not None and getattr(shuffle, "seed", None) is None:
            return "shuffle='files'"
    return None


def known_count(dataset: Any) -> int | None:
    """Return the number of rows as far as the footers of parquet files tell; None if it would have to be computed."""
    source = _parquet_source(dataset)
    return None if source is None or not keeps_count(dataset) else sum(_counts(source))


def has_counts(dataset: Any) -> bool:
    """Return whether the rows come from files of parquet, so that :func:`without_first` may leave some out."""
    return _parquet_source(dataset) is not None


def keeps_count(dataset: Any) -> bool:
    """Return whether it is known that each row of the source makes one row."""
    return all(getattr(operator, "can_modify_num_rows", True) is False for operator in _operators(dataset)[:-1])


def without_first(dataset: Any, rows: int) -> tuple[Any, int]:
    """Leave out the first rows, as far as whole row groups of parquet files can be left out unread.

    Returns:
        The dataset, which is the same object, and how many rows it lacks now: ``rows`` at most.
    """
    source = _parquet_source(dataset) if rows else None
    if source is None or source._shuffle is not None or getattr(source, "_predicate_expr", None) is not None:
        return dataset, 0
    skipped, kept = 0, []
    fragments = list(source._pq_fragments)
    for number, (fragment, count) in enumerate(zip(fragments, _counts(source), strict=False)):
        if skipped + count <= rows and number < len(fragments) - 1:
            skipped += count
            continue
        groups = [fragment.original.metadata.row_group(i).num_rows for i in range(fragment.original.num_row_groups)]
        first = 0
        while first < len(groups) - 1 and skipped + groups[first] <= rows:
            skipped += groups[first]
            first += 1
        kept = [_RowGroups(fragment, range(first, len(groups))) if first else fragment, *fragments[number + 1 :]]
        break
    source._pq_fragments = kept
    source._pq_paths = [fragment.original.path for fragment in kept]
    return dataset, skipped


def blocks(dataset: Any) -> Iterator[Block]:
    """Yield the blocks of a dataset that have rows, while its tasks run. Close the iterator to end them."""
    bundles = iter(dataset.iter_internal_ref_bundles())
    try:
        for bundle in bundles:
            schema = "" if bundle.schema is None else _schema_text(bundle.schema)
            slices = bundle.slices or [None] * len(bundle.blocks)
            for entry, part in zip(bundle.blocks, slices, strict=True):
                first, end = (0, entry.metadata.num_rows) if part is None else (part.start_offset, part.end_offset)
                if end > first:
                    yield Block(entry.ref, first, end - first, schema, entry.metadata.size_bytes or 0)
    finally:
        del bundles  # the only reference to what runs the tasks


def columns(ref: Any) -> Mapping[str, Any]:
    """Return the columns of a block as arrays, which share the memory of the object store where they can.

    Raises:
        ValueError: numbers are missing. The type of a column would depend on the block.
    """
    from ray.data.block import BlockAccessor

    block = ray.get(ref)
    table: Any = BlockAccessor.for_block(block).to_numpy()
    found = {name: np.asarray(column) for name, column in table.items()}
    for name, column in found.items():
        if column.dtype.kind == "f" and getattr(block, "schema", None) is not None and block[name].null_count:
            raise ValueError(f"rows without a value in the column {name}; fill them in a function of the data")
    return found


def free_cpus() -> tuple[float, float]:
    """Return how many CPUs of the cluster no placement group reserves, and how many it has."""
    groups = ray.util.placement_group_table().values()
    reserved = sum(
        bundle.get("CPU", 0.0)
        for group in groups
        if group["state"] == "CREATED"
        for bundle in group["bundles"].values()
    )
    total = ray.cluster_resources().get("CPU", 0.0)
    return total - reserved, total


def no_cpus() -> str | None:
    """Return why tasks of the data would wait for ever; None if they do not."""
    free, total = free_cpus()
    if free >= 1:
        return None
    return (
        f"{total - free:g} of the {total:g} CPUs of the cluster are reserved, by the workers of this run and by "
        "others, so that the tasks of Ray Data would wait for ever; lower strategy.num_workers or "
        "cluster.cpus_per_worker, or add nodes"
    )


def store_bytes() -> float:
    """Return the size of the object stores of all nodes; infinite without Ray."""
    return float(ray.cluster_resources().get("object_store_memory", math.inf)) if ray.is_initialized() else math.inf


class _RowGroups:
    """Some row groups of a parquet file, in the place of the whole one. Nothing is read to pickle it."""

    def __init__(self, fragment: Any, groups: Sequence[int], *, whole: Any = None):
        whole = fragment.original if whole is None else whole
        self.file_size = fragment.file_size
        self.original = whole.format.make_fragment(
            whole.path, whole.filesystem, whole.partition_expression, row_groups=list(groups)
        )
        self._remake: tuple[Callable[..., Any], tuple[Any, ...]] = (_RowGroups, (fragment, list(groups)))

    def __reduce__(self) -> Any:
        return self._remake


def _operators(dataset: Any) -> list[Any]:
    """Return the operators of a dataset from the last one to its source; only the last one if there are branches."""
    found = [dataset._logical_plan.dag]
    while len(inputs := found[-1].input_dependencies) == 1:
        found.append(inputs[0])
    return found if not found[-1].input_dependencies else found[:1]


def _parquet_source(dataset: Any) -> Any:
    """Return the parquet source of a dataset that has a row for each row of it; None if there is none."""
    try:
        *operators, read = _operators(dataset)
        source = getattr(read, "datasource", None)
        known = type(source).__name__ == "ParquetDatasource" and hasattr(source, "_pq_fragments")
        return source if known and all(type(o).__name__ in _KEEPS_ROWS for o in operators) else None
    except (AttributeError, ValueError):
        return None


def _counts(source: Any) -> list[int]:
    """Return the number of rows of each file of a parquet source, from its footer."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(lambda fragment: int(fragment.original.metadata.num_rows), source._pq_fragments))


def _schema_text(schema: Any) -> str:
    names, types = schema.names, schema.types
    return ", ".join(f"{name}: {kind}" for name, kind in zip(names, types, strict=True))

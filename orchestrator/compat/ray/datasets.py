"""Ray Data as the feeder uses it: rows in one order, from any row, as references to blocks.

Ray Data is imported with the first dataset.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray

from orchestrator.compat.ray.counted_sources import operators
from orchestrator.compat.ray.gcs import total_resources

LEAST_BLOCKS = 4
"""So many blocks of an operator may wait at least; on more CPUs, two for each of them."""


class SchemaError(Exception):
    """Blocks of a dataset do not go together; the text is a clause that says why."""


@dataclass(frozen=True)
class Block:
    """Rows of a block in the object store; the sizes are of all of it, and of one row."""

    ref: Any
    first: int
    rows: int
    schema: Mapping[str, str]
    num_bytes: int
    row_bytes: float


@contextlib.contextmanager
def in_order() -> Iterator[None]:
    """Let the datasets that are made in this context give their rows in the order of their source.

    The parquet source of old is used, because the new one packs row groups of several files into tasks by size.
    """
    if "ray.data" not in sys.modules:
        name, value = "RAY_DATA_USE_DATASOURCE_V2", os.environ.get("RAY_DATA_USE_DATASOURCE_V2")
        os.environ[name] = "0"  # read when it is imported
        try:
            yield
        finally:  # ranks inherit the variables of a driver, and would open files by tasks, which may find no CPU
            del os.environ[name]
            if value is not None:
                os.environ[name] = value
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


def is_dataset(value: Any) -> bool:
    """Return whether a value is a dataset, and nothing else of Ray Data, such as an iterator over one."""
    return "ray.data" in sys.modules and isinstance(value, sys.modules["ray.data"].Dataset)


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
    dataset.context.enforce_schemas = True  # otherwise each block is said to have the schema of the first one
    dataset.context._execution_idx = execution
    _limit_blocks(dataset.context, max(LEAST_BLOCKS, int(2 * ray.cluster_resources().get("CPU", 0.0))))


def _limit_blocks(context: Any, most: int) -> None:
    """Let no operator begin a task while so many of its blocks wait: tasks take CPUs that the workers share."""
    from ray.data._internal.execution import backpressure_policy as policies

    class Blocks(policies.BackpressurePolicy):  # which tasks receive as a value, and do not import
        def can_add_input(self, op: Any) -> bool:
            return bool(self._topology[op].total_enqueued_output_blocks() < most)

    key = policies.ENABLED_BACKPRESSURE_POLICIES_CONFIG_KEY
    context.set_config(key, [*context.get_config(key, policies.ENABLED_BACKPRESSURE_POLICIES), Blocks])


def unseeded_operator(dataset: Any) -> str | None:
    """Return the operator that draws another order in each execution; None if there is none."""
    for operator in operators(dataset):
        config = getattr(operator, "seed_config", None)
        if config is not None and config.seed is None:
            return {"RandomShuffle": "random_shuffle", "RandomizeBlocks": "randomize_block_order"}.get(
                type(operator).__name__, "random_sample"
            )
        shuffle = getattr(getattr(operator, "datasource", None), "_shuffle", None)
        if shuffle is not None and getattr(shuffle, "seed", None) is None:
            return "shuffle='files'"
    return None


def blocks(dataset: Any) -> Iterator[Block]:
    """Yield the blocks of a dataset that have rows, while its tasks run. Close the iterator to end them.

    Raises:
        SchemaError: blocks have columns of types that do not go together.
    """
    bundles = iter(dataset.iter_internal_ref_bundles())
    try:
        for bundle in bundles:
            slices = bundle.slices or [None] * len(bundle.blocks)
            for entry, part in zip(bundle.blocks, slices, strict=True):
                first, end = (0, entry.metadata.num_rows) if part is None else (part.start_offset, part.end_offset)
                if end > first:
                    schema = getattr(entry.metadata, "schema", None) or bundle.schema
                    num_bytes, rows = entry.metadata.size_bytes or 0, entry.metadata.num_rows or end
                    yield Block(entry.ref, first, end - first, _types(schema), num_bytes, num_bytes / rows)
    except TypeError as e:
        if type(e).__name__ != "ArrowTypeError":
            raise
        raise SchemaError(str(e)) from e
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


def unreserved() -> list[dict[str, float]]:
    """Return the resources of each living node that no placement group reserves."""
    left = {node_id: dict(resources) for node_id, resources in total_resources().items()}
    for group in ray.util.placement_group_table().values():
        if group["state"] == "CREATED":
            for number, bundle in group["bundles"].items():
                node = left.get(group["bundles_to_node_id"].get(number), {})
                for kind in node.keys() & bundle.keys():
                    node[kind] -= bundle[kind]
    return list(left.values())


def free_cpus() -> tuple[float, float]:
    """Return how many CPUs of the cluster no placement group reserves, and how many it has."""
    return sum(node.get("CPU", 0.0) for node in unreserved()), ray.cluster_resources().get("CPU", 0.0)


def no_cpus() -> str | None:
    """Return why tasks of the data would wait for ever; None if a node has a CPU for them."""
    if any(node.get("CPU", 0.0) >= 1 for node in unreserved()):
        return None
    return (
        f"{reserved()}, and no node has one left, so that the tasks of Ray Data would wait for ever; lower "
        "strategy.num_workers or cluster.cpus_per_worker, or add nodes"
    )


def reserved() -> str:
    """Return how many CPUs of the cluster are reserved, as a clause."""
    free, total = free_cpus()
    return (
        f"{total - free:g} of the {total:g} CPUs of the cluster are reserved, by the workers of this run and by others"
    )


def needs_of(dataset: Any) -> list[tuple[str, dict[str, float], int]]:
    """Return for each operator its name, the resources of each of its tasks or actors, and how many actors it keeps."""
    found = []
    for operator in dataset._logical_plan.dag.post_order_iter():
        if (compute := getattr(operator, "compute", None)) is None:
            continue
        options = operator.ray_remote_args or {}
        asked = {"CPU": options.get("num_cpus"), "GPU": options.get("num_gpus"), **(options.get("resources") or {})}
        each = {kind: float(number) for kind, number in asked.items() if number is not None}
        each.setdefault("CPU", 0.0 if each.get("GPU") else 1.0)
        found.append((operator.name, each, getattr(compute, "min_size", 0)))
    return found


def store_bytes() -> float:
    """Return the size of the object stores of all nodes; infinite without Ray."""
    return float(ray.cluster_resources().get("object_store_memory", math.inf)) if ray.is_initialized() else math.inf


def _types(schema: Any) -> dict[str, str]:
    """Return the type of each column, ``null`` if no row has a value; nothing if the schema is not known."""
    return {} if schema is None else dict(zip(schema.names, map(str, schema.types), strict=True))

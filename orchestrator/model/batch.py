"""Batches and outputs of models: trees of tensors that are split, moved, cut and joined.

A tree is made of tensors in tuples, lists, mappings, dataclasses, and every type that is registered with torch's
pytree, such as the outputs of Hugging Face models. Each function here returns containers of the types it was given.
Any other object in a tree, such as a string or a cache of keys and values, is opaque: it is passed on as it is.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from orchestrator.compat.torch import pytree
from orchestrator.user_code.errors import JobError
from orchestrator.user_code.results import kind_of


def split_batch(batch: Any) -> tuple[Any, Any]:
    """Return the input and the target of a collated batch.

    Args:
        batch: a pair ``(input, target)``; or a mapping, such as a dict, which is both the input and the target; or None
            on a rank that reads no data.

    Returns:
        The input and the target; two times None for None.

    Raises:
        JobError: ``batch`` is something else.
    """
    if batch is None or isinstance(batch, Mapping):
        return batch, batch
    if not isinstance(batch, Tensor):
        with contextlib.suppress(TypeError, ValueError):
            inputs, target = batch
            return inputs, target
    kind = kind_of(batch) + (f" of {len(batch)}" if isinstance(batch, (tuple, list)) else "")
    raise JobError(
        f"the batch is {kind}: let the items of Job.dataset, or Job.collate, be pairs (input, target) or dicts"
    )


def map_leaves(function: Callable[..., Any], *trees: Any) -> Any:
    """Call ``function`` on everything in a tree that is not a container, and rebuild the containers.

    Args:
        function: takes one leaf of each tree, all at the same place.
        trees: one or more trees of the same structure.

    Returns:
        The results, in containers of the types of the first tree. A mapping of a type that cannot be built from a dict
        becomes a dict.

    Raises:
        ValueError: the trees differ in structure.
    """

    def at(*nodes: Any) -> Any:
        first = nodes[0]
        if any(type(node) is not type(first) for node in nodes) and not all(isinstance(n, Tensor) for n in nodes):
            raise ValueError(" and ".join(sorted({type(node).__name__ for node in nodes})) + " in the same place")
        # Containers that pytree does not know. One whose content stays the same is returned itself.
        if isinstance(first, Mapping):
            if any(node.keys() != first.keys() for node in nodes):
                raise ValueError(f"{type(first).__name__} with different keys in the same place")
            return _rebuilt_mapping(first, {k: map_leaves(function, *(node[k] for node in nodes)) for k in first})
        if dataclasses.is_dataclass(first):
            names = [field.name for field in dataclasses.fields(first) if hasattr(first, field.name)]
            return _rebuilt_dataclass(
                first, {name: map_leaves(function, *(getattr(node, name) for node in nodes)) for name in names}
            )
        if isinstance(first, (tuple, list)):
            if any(len(node) != len(first) for node in nodes):
                raise ValueError(f"{type(first).__name__} of different lengths in the same place")
            return type(first)(map_leaves(function, *parts) for parts in zip(*nodes, strict=True))
        return function(*nodes)

    return pytree.tree_map(at, *trees)


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Call ``function`` on each tensor of a tree, and rebuild the containers; everything else stays as it is."""
    return map_leaves(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, tree)


def leaves(tree: Any) -> Iterator[Any]:
    """Yield everything in a tree that is not a container, in the order of :func:`map_leaves`."""
    for node in pytree.tree_leaves(tree):
        if isinstance(node, Mapping):
            parts = list(node.values())
        elif dataclasses.is_dataclass(node):
            parts = [getattr(node, field.name) for field in dataclasses.fields(node) if hasattr(node, field.name)]
        elif isinstance(node, (tuple, list)):
            parts = list(node)
        else:
            yield node
            continue
        for part in parts:
            yield from leaves(part)


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors of a tree."""
    return [leaf for leaf in leaves(tree) if isinstance(leaf, Tensor)]


def to_device(batch: Any, device: torch.device) -> Any:
    """Move the tensors of a tree to ``device``.

    Copies from pinned memory are asynchronous. On the CPU, returns ``batch`` itself.
    """
    if device.type == "cpu":
        return batch
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), batch)


def num_rows(tree: Any) -> int | None:
    """Return the number of samples in a tree: the first dimension of its first tensor; None if it has none."""
    return next((len(t) for t in tensors_in(tree) if t.ndim), None)


def rows_between(tree: Any, start: int, stop: int) -> Any:
    """Cut each tensor of a tree to its samples from ``start`` to ``stop``; scalars stay as they are."""
    return map_tensors(lambda tensor: tensor[start:stop] if tensor.ndim else tensor, tree)


def first_rows(tree: Any, rows: int) -> Any:
    """Cut each tensor of a tree to its first ``rows`` samples; scalars stay as they are."""
    return rows_between(tree, 0, rows)


def has_row_per_sample(tree: Any, rows: int) -> bool:
    """Return whether a tree consists of tensors with ``rows`` samples only, so that cutting it leaves out samples.

    A scalar, such as a loss that the model computes itself, and an opaque object, such as a cache, depend on all
    samples. None does not.
    """
    return all(
        leaf is None or (isinstance(leaf, Tensor) and leaf.ndim > 0 and len(leaf) == rows) for leaf in leaves(tree)
    )


def join(outputs: Sequence[Any], device: torch.device) -> Any:
    """Join the outputs for consecutive parts of a batch on ``device``.

    Returns:
        A tree like the first output. Tensors are concatenated, and scalar tensors stacked. Other values that are equal
        in all outputs are kept. Those that are not, such as caches, become a :class:`NotJoined`, and so do tensors
        whose shapes differ in more than the number of samples, such as similarities of all samples to each other.

    Raises:
        ValueError: the outputs differ in structure.
    """

    def at(*leaves: Any) -> Any:
        first = leaves[0]
        if isinstance(first, Tensor):
            if len({(leaf.ndim, leaf.shape[1:]) for leaf in leaves}) > 1:
                return NotJoined("tensor of shape " + " or ".join(str(list(leaf.shape)) for leaf in leaves))
            moved = [leaf.to(device) for leaf in leaves]
            return torch.stack(moved) if first.ndim == 0 else torch.cat(moved)
        if all(leaf is first for leaf in leaves):
            return first
        if isinstance(first, (bool, int, float, str, bytes)) and all(leaf == first for leaf in leaves):
            return first
        return NotJoined(type(first).__name__)

    try:
        return map_leaves(at, *outputs)
    except ValueError as e:
        raise ValueError(f"the outputs for different parts of a batch cannot be joined: {e}") from e


class NotJoined:
    """The place of a value that each part of a batch has its own of. Any use of it raises a ValueError."""

    def __init__(self, kind: str):
        """``kind``: the type of the values, for the message."""
        vars(self)["kind"] = kind

    def __repr__(self) -> str:
        return f"<{vars(self)['kind']} of each replica>"

    def __getattr__(self, name: str) -> NoReturn:
        self._refuse()

    def __getitem__(self, key: Any) -> NoReturn:
        self._refuse()

    def __iter__(self) -> NoReturn:
        self._refuse()

    def __len__(self) -> NoReturn:
        self._refuse()

    def __bool__(self) -> NoReturn:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise ValueError(
            f"the output has a {vars(self)['kind']} of each replica, and these cannot be joined for Job.loss and "
            "Job.metrics; use only tensors of the output there, or strategy=ddp"
        )


def _rebuilt_mapping(mapping: Mapping[Any, Any], values: dict[Any, Any]) -> Mapping[Any, Any]:
    if all(values[key] is mapping[key] for key in values):
        return mapping
    try:
        rebuilt: Mapping[Any, Any] = type(mapping)(values)  # type: ignore[call-arg]
        same = rebuilt.keys() == values.keys() and all(rebuilt[key] is values[key] for key in values)
    except TypeError:
        same = False
    return rebuilt if same else values


def _rebuilt_dataclass(instance: Any, values: dict[str, Any]) -> Any:
    changed = {name: value for name, value in values.items() if value is not getattr(instance, name)}
    if not changed:
        return instance
    given = {field.name for field in dataclasses.fields(instance) if field.init}
    rebuilt = dataclasses.replace(instance, **{name: value for name, value in changed.items() if name in given})
    for name in changed.keys() - given:
        object.__setattr__(rebuilt, name, changed[name])
    return rebuilt

"""Metrics of a whole set that are no sums, such as an F1 score: objects of the job, which each rank updates."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from orchestrator.compat import torchmetrics
from orchestrator.compat.torch import as_bytes
from orchestrator.job import Job
from orchestrator.strategies.measure.job_metrics import checked_name
from orchestrator.user_code.errors import JobError
from orchestrator.user_code.results import kind_of

MOST_BYTES = 2**30
"""The size of the states of all ranks, which one of them joins."""

Packed = Mapping[str, Tensor]
"""The state of each object by its name, as bytes; empty if nothing has been added to them."""

_METHOD = "metric_objects"
_CPU = torch.device("cpu")


class MetricObjects:
    """The job's objects for one evaluation of a split. Their values are computed on the rank that joins them.

    Raises:
        JobError: an object cannot be used; the text says why.
    """

    def __init__(self, job: Job, split: str, device: torch.device = _CPU):
        self._objects: dict[str, Any] = {}
        self._names: dict[str, Names] = {}
        self._updated = False
        for name, value in job.metric_objects(split).items():
            if (problem := _problem(value)) is not None:
                raise JobError(f"job.{_METHOD}: {checked_name(name, _METHOD)!r} is {kind_of(value)}{problem}")
            if torchmetrics.is_metric(value):
                torchmetrics.keep_local(value)
            self._objects[checked_name(name, _METHOD)] = value.to(device) if isinstance(value, nn.Module) else value

    def __bool__(self) -> bool:
        return bool(self._objects)

    def update(self, output: Any, target: Any) -> None:
        """Add the samples of a part of a batch to all objects."""
        self._updated = True
        for value in self._objects.values():
            value.update(output, target)

    def packed(self, *, most: int) -> Packed:
        """Return the states, to be sent to another rank.

        Args:
            most: the bytes that they may have together.

        Raises:
            JobError: they have more, or one cannot be pickled.
        """
        packed: dict[str, bytes] = {}
        for name, value in self._objects.items():
            packed[name], self._names[name] = _pickled(name, value)
        if sum(map(len, packed.values())) > most:
            name = max(packed, key=lambda name: len(packed[name]))
            raise JobError(
                f"job.{_METHOD}: the state of {name!r} has {len(packed[name]) / 2**20:.0f} MiB on this worker, "
                f"and one worker joins those of all: each may have {most / 2**20:.0f} MiB of states; keep sums or "
                "bins instead of every output, such as thresholds=200 in torchmetrics, or evaluate fewer samples"
            )
        return {n: torch.frombuffer(bytearray(d), dtype=torch.uint8) for n, d in packed.items() if self._updated}

    def join(self, ranks: Sequence[Packed]) -> None:
        """Let the objects have what those of all ``ranks`` have together, after :meth:`packed` of their own.

        Raises:
            JobError: an object cannot be merged.
        """
        updated = [packed for packed in ranks if packed]
        self._updated = bool(updated)
        if not updated:
            return
        for name, value in self._objects.items():
            module, names = type(value).__module__, self._names[name]
            try:
                states = [unpickled(packed[name].numpy().tobytes(), names, module=module) for packed in updated]
                self._objects[name] = _joined(value, states)
            except Exception as e:
                raise JobError(f"job.{_METHOD}: {name!r} ({type(value).__name__}) cannot be merged: {e}") from e

    def values(
        self, taken: Collection[str] = (), *, failed: Callable[[str, Exception], None] | None = None
    ) -> dict[str, float] | None:
        """Return the metrics by name; empty without a sample.

        Args:
            taken: the names of other metrics.
            failed: called with the name of an object that cannot be computed, and the error; None to raise it.

        Returns:
            None if ``failed`` was called.

        Raises:
            JobError: an object computes something else than numbers, or a name is taken.
            Exception: whatever an object raises.
        """
        found: dict[str, float] = {}
        if not self._updated:
            return found
        for name, value in self._objects.items():
            try:
                with torch.no_grad():
                    computed = value.compute()
            except Exception as e:
                if failed is None:
                    raise
                failed(name, e)
                return None
            for own, number in computed.items() if isinstance(computed, Mapping) else [(name, computed)]:
                if checked_name(own, _METHOD) in {*taken, *found}:
                    raise JobError(f"job.{_METHOD}: {name!r} computes {own!r}, and so does another metric; rename one")
                found[own] = _number(name, number)
        return found


def metric_object_errors(job: Job, splits: Collection[str]) -> list[str]:
    """Return why the objects of the job cannot be used, before anything is evaluated."""
    try:
        for split in splits:
            MetricObjects(job, split).packed(most=MOST_BYTES)
            before, after = job.metric_objects(split), job.metric_objects(split)
            if kept := [name for name in before if before[name] is after.get(name)]:
                return [f"job.{_METHOD} returns the same object {kept[0]!r} again; make a new one in each call"]
    except JobError as e:
        return [str(e)]
    return []


def misspelled(job: Job, prefixes: Mapping[str, str], metric: str) -> str | None:
    """Return the metric of an object that ``metric`` means, if it differs in capitals only; None otherwise.

    What :meth:`Job.metrics` and objects with several results report is not known before an evaluation.

    Args:
        prefixes: what the names of the metrics of each split begin with.
        metric: the name that is asked for.
    """
    for prefix, objects in ((prefix, job.metric_objects(split)) for split, prefix in prefixes.items()):
        for name, value in objects.items():
            known = f"{prefix}{name}"
            if known.lower() == metric.lower() and metric.removeprefix(prefix) not in objects and _is_one(value):
                return known
    return None


def _is_one(value: Any) -> bool:
    """Return whether an object without samples computes a number."""
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            return not isinstance(value.compute(), Mapping)
    except Exception:  # it needs samples
        return False


def _problem(value: Any) -> str | None:
    if torchmetrics.is_metric(value):
        return None
    if isinstance(value, nn.ModuleDict):  # a MetricCollection, whose metrics may share their states
        return "; return its metrics one by one, as dict(collection.items())"
    if missing := [name for name in ("update", "merge", "compute") if not callable(getattr(value, name, None))]:
        return (
            f"; it has no {', '.join(f'{name}()' for name in missing)}: return a metric of torchmetrics, or an object "
            "with update(output, target), merge(other) and compute()"
        )
    return None if hasattr(value, "__dict__") else "; let its class have no __slots__"


def _state_of(value: Any) -> Any:
    return torchmetrics.state_of(value) if torchmetrics.is_metric(value) else vars(value)


def _joined(value: Any, states: Sequence[Any]) -> Any:
    """Return an object like ``value`` with all ``states``."""
    if torchmetrics.is_metric(value):
        torchmetrics.set_joined(value.cpu(), states)
        return value
    joined, *others = (_like(value, state) for state in states)
    for other in others:
        merged = joined.merge(other)
        joined = merged if isinstance(merged, type(joined)) else joined
    return joined


def _like(value: Any, state: Mapping[str, Any]) -> Any:
    """Return an object of the class of ``value``, which need not be importable, as in a notebook."""
    made = copy.copy(value)
    vars(made).clear()
    vars(made).update(state)
    return made


def _pickled(name: str, value: Any) -> tuple[bytes, Names]:
    try:
        return pickled(_state_of(value))
    except Exception as e:
        raise JobError(
            f"job.{_METHOD}: {name!r} ({type(value).__name__}) cannot be sent to another worker: {e}; keep tensors, "
            "numbers and collections of them in its attributes"
        ) from e


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise JobError(
            f"job.{_METHOD}: {name!r} computes {kind_of(value)}; return a number, or a dict of numbers by name"
        ) from None


Names = frozenset[tuple[str, str]]
"""Functions and classes, each by its module and its name there."""


def pickled(value: Any) -> tuple[bytes, Names]:
    """Return ``value`` as bytes, with tensors as those of a CPU, and what is called to load it.

    Raises:
        Exception: it cannot be pickled.
    """
    buffer = io.BytesIO()
    pickler = _Pickler(buffer, protocol=5)
    pickler.dump(value)
    return buffer.getvalue(), frozenset(pickler.names)


def unpickled(data: bytes, names: Collection[tuple[str, str]], *, module: str) -> Any:
    """Return the value of which ``data`` was made.

    Somebody who reaches the ports of a process group could send a pickle of their own. So a rank loads only plain data,
    classes of the module of the object, and what it would pickle itself.

    Args:
        data: the first result of :func:`pickled` on another rank.
        names: what may be called, besides what plain data needs.
        module: whose classes may be called too.

    Raises:
        pickle.UnpicklingError: it would call something else.
    """
    unpickler = _Unpickler(io.BytesIO(data))
    unpickler.names, unpickler.module = _PLAIN | frozenset(names), module
    return unpickler.load()


class _Pickler(pickle.Pickler):
    def __init__(self, file: Any, protocol: int):
        super().__init__(file, protocol)
        self.names: set[tuple[str, str]] = set()

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Tensor):  # without the rest of the memory that a view is a part of
            data = as_bytes(obj.detach().cpu()).numpy().tobytes()
            return _tensor, (data, str(obj.dtype).removeprefix("torch."), tuple(obj.shape))
        if isinstance(obj, (type, FunctionType, BuiltinFunctionType)):
            self.names.add((obj.__module__, obj.__qualname__))
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    names: Names
    module: str

    def find_class(self, module: str, name: str, /) -> Any:
        if (module, name) not in self.names:
            found = super().find_class(module, name) if module == self.module else None
            if not isinstance(found, type) or found.__module__ != module:
                raise pickle.UnpicklingError(f"it holds a {module}.{name}, which is no plain data")
        return super().find_class(module, name)


def _tensor(data: bytes, dtype: str, shape: tuple[int, ...]) -> Tensor:
    made = torch.empty(shape, dtype=getattr(torch, dtype))
    if data:
        as_bytes(made).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return made


_COLLECTIONS: tuple[Any, ...] = (Counter("a"), OrderedDict(), defaultdict(list), defaultdict(int), deque())
_PLAIN = pickled([*_COLLECTIONS, 1j, np.zeros(2), np.ones(2)[0], torch.zeros(1)])[1]

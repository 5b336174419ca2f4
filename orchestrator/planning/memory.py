"""The memory that a model takes on each worker, from the sizes of its parameters. Pure, no torch."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from orchestrator.planning.mesh import Mesh

MIB, GIB = 2**20, 2**30


@dataclass(frozen=True, kw_only=True)
class ParameterSize:
    """A parameter, which is divided along its first dimension.

    Attributes:
        rows: the size of that dimension; 1 for a parameter without any.
        row_bytes: the bytes of a row.
        trained: whether it has a gradient.
        state_bytes: the bytes of optimizer state for each row.
        whole_bytes: those that each worker with a shard of it has.
        state_known: whether both are known; they count as 0 otherwise.
    """

    rows: int
    row_bytes: int
    trained: bool
    state_bytes: float
    whole_bytes: float = 0.0
    state_known: bool = True


@dataclass(frozen=True, kw_only=True)
class Division:
    """The number of workers over which the rows of each parameter, gradient and optimizer state are divided, the
    number of workers over which all parameters are, and whether all of that is in host memory."""

    parameters: int = 1
    gradients: int = 1
    optimizer: int = 1
    stages: int = 1
    on_host: bool = False

    @classmethod
    def of(cls, mesh: Mesh) -> Division:
        """Return the same division for all tensors: over the shards and the stages of ``mesh``."""
        shards = mesh.num_shards
        return cls(parameters=shards, gradients=shards, optimizer=shards, stages=mesh.pipeline)

    @property
    def divided(self) -> Literal["each tensor", "the optimizer's state"] | None:
        """What workers have shards of; None if of nothing."""
        if self.parameters > 1:
            return "each tensor"
        return "the optimizer's state" if self.optimizer > 1 else None


@dataclass(frozen=True, kw_only=True)
class WorkerMemory:
    """The memory of the worker that needs most, in bytes; of stages, that of an average one.

    Attributes:
        parameters: its shards of the parameters.
        gradients: those of their gradients.
        optimizer: those of the optimizer state, with the averages of the weights.
        gathered: the shards of other workers that it has at the same time, and their gradients.
        casts: the copies of its parameters in 16 bits that autocast makes for a pass.
        activations: what forward passes keep for the backward pass; None if unknown.
        on_host: whether parameters, gradients and optimizer state are in host memory, and only the rest on the device.
    """

    parameters: float
    gradients: float
    optimizer: float
    on_host: bool = False
    gathered: float = 0.0
    casts: float = 0.0
    activations: float | None = None

    @property
    def state(self) -> float:
        """What a worker has on its device in any case."""
        return 0.0 if self.on_host else self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        """All that is known of."""
        return self.state + self.gathered + self.casts + (self.activations or 0.0)


def worker_memory(sizes: Sequence[ParameterSize], division: Division) -> WorkerMemory:
    """Return the memory of the parameters on a worker."""

    def rows(size: ParameterSize, workers: int) -> int:
        return math.ceil(size.rows / workers)

    trained = [size for size in sizes if size.trained]
    return WorkerMemory(
        parameters=sum(rows(s, division.parameters) * s.row_bytes for s in sizes) / division.stages,
        gradients=sum(rows(s, division.gradients) * s.row_bytes for s in trained) / division.stages,
        optimizer=sum(rows(s, division.optimizer) * s.state_bytes + s.whole_bytes for s in trained) / division.stages,
        on_host=division.on_host,
    )


def gathered_bytes(groups: Sequence[float], *, keep_whole: bool, ahead: int = 1, share: float = 1.0) -> float:
    """Return what a worker gathers at the same time, with the gradients of a group.

    Args:
        groups: the bytes of the parameters that are gathered together, and of their gradients; at the end, of those in
            no group.
        keep_whole: whether what a step has gathered is kept up to its end.
        ahead: how many groups are gathered beside the one that is used.
        share: the fraction of these bytes that is gathered. Parameters may be cast before.
    """
    *of_groups, rest = groups
    largest = sorted(of_groups)[-1 - ahead :] or [0]
    return share * (rest + (sum(of_groups) if keep_whole else sum(largest))) + max(largest[-1], rest)


@dataclass(frozen=True, kw_only=True)
class MemoryLimit:
    """The memory that there is for workers.

    Attributes:
        largest_bytes: what one worker can have at most: a GPU, or the memory of a node; 0 if unknown.
        total_bytes: what all workers have together, which more workers have to share; infinite if each has its own.
    """

    largest_bytes: float = 0.0
    total_bytes: float = math.inf

    def of_each(self, sharers: int) -> float:
        """Return what each of so many has at most; 0 if unknown."""
        return min(self.largest_bytes, self.total_bytes / sharers)


UNKNOWN = MemoryLimit()


@dataclass(frozen=True, kw_only=True)
class NodeShare:
    """The node whose workers have least host memory each.

    Attributes:
        workers: the most of them that may be there.
        memory_bytes: what they have together; 0 if unknown.
        is_only: whether there is no other node.
    """

    workers: int = 1
    memory_bytes: float = 0.0
    is_only: bool = False


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """What the workers of a node take of its host memory, in bytes.

    Attributes:
        models: what they train there: nothing if that is on GPUs.
        peer_copies: copies of their own state and of the state of neighbours, for recovery.
        snapshots: what is being written into checkpoints.
    """

    models: float
    peer_copies: float
    snapshots: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.models + self.peer_copies + self.snapshots


def fewest_parts(sizes: Sequence[ParameterSize], limit: MemoryLimit) -> int | None:
    """Return the smallest number of workers over which parameters, gradients and optimizer state can be divided to fit.

    Args:
        limit: the memory of the workers.

    Returns:
        The number, at least 2; None if no number fits.
    """

    def state(parts: int) -> float:
        return worker_memory(sizes, Division(parameters=parts, gradients=parts, optimizer=parts)).state

    numbers = range(2, max((size.rows for size in sizes), default=0) + 1)
    place = bisect.bisect_left(numbers, True, key=lambda parts: state(parts) <= limit.largest_bytes)
    fewest = numbers[place] if place < len(numbers) else None
    return fewest if fewest and state(fewest) <= limit.of_each(fewest) else None


def size_text(size_bytes: float) -> str:
    """Return a size as ``1.5 GiB`` or ``0.02 MiB``."""
    if size_bytes < GIB:
        return f"{size_bytes / MIB:.3g} MiB"
    number = size_bytes / GIB
    return f"{number:.3g} GiB" if number < 999.5 else f"{number:,.0f} GiB"  # .3g would round more to 1e+03

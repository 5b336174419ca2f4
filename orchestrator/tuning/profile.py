"""What a few seconds of measurement on the workers tell about a job and their machines."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from orchestrator.model.stages.cut import Layer

MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Affine:
    """A time that grows with a size: ``overhead_ms`` at size 0, and ``ms_per_unit`` for each unit of it."""

    overhead_ms: float
    ms_per_unit: float

    def at(self, size: float) -> float:
        """Return the milliseconds for ``size`` units."""
        return self.overhead_ms + self.ms_per_unit * size


NO_COST = Affine(overhead_ms=0.0, ms_per_unit=0.0)


def fit(points: Sequence[tuple[float, float]]) -> Affine:
    """Fit pairs of a size and its milliseconds, by least squares of the relative errors. No coefficient is negative."""
    weights = [1 / ms**2 for _, ms in points]
    total = math.fsum(weights)
    mean_size = math.fsum(w * size for w, (size, _) in zip(weights, points, strict=True)) / total
    mean_ms = math.fsum(w * ms for w, (_, ms) in zip(weights, points, strict=True)) / total
    spread = math.fsum(w * (size - mean_size) ** 2 for w, (size, _) in zip(weights, points, strict=True))
    if spread == 0:
        return Affine(overhead_ms=mean_ms, ms_per_unit=0.0)
    shared = math.fsum(w * (size - mean_size) * ms for w, (size, ms) in zip(weights, points, strict=True))
    slope = max(0.0, shared / spread)
    overhead_ms = mean_ms - slope * mean_size
    if overhead_ms < 0:
        squares = math.fsum(w * size**2 for w, (size, _) in zip(weights, points, strict=True))
        slope = math.fsum(w * size * ms for w, (size, ms) in zip(weights, points, strict=True)) / squares
    return Affine(overhead_ms=max(0.0, overhead_ms), ms_per_unit=slope)


@dataclass(frozen=True, kw_only=True)
class LayerProfile:
    """A layer: its passes over ``Profile.layer_rows`` samples, and its sizes.

    Attributes:
        activation_bytes: what a sample keeps in memory until the backward pass.
        output_bytes: what a sample sends on.
        cast_bytes: the copies of its parameters that autocast makes for each pass; 0 in other precisions.
    """

    name: str
    num_parameters: int
    trainable: bool
    parameter_bytes: int
    forward_ms: float
    backward_ms: float
    activation_bytes: float
    output_bytes: float
    cast_bytes: int = 0

    @property
    def total_ms(self) -> float:
        """The time of both passes, in milliseconds."""
        return self.forward_ms + self.backward_ms

    @property
    def layer(self) -> Layer:
        """The layer, as the cut of a model into stages sees it."""
        return Layer(name=self.name, num_parameters=self.num_parameters, trainable=self.trainable)


@dataclass(frozen=True, kw_only=True)
class StageDivision:
    """The model divided finely enough for ``num_stages`` stages; without layers, ``refused`` says why it cannot be."""

    num_stages: int
    layers: tuple[LayerProfile, ...]
    refused: str


@dataclass(frozen=True, kw_only=True)
class PassCost:
    """The whole model on ``rows`` samples, while ``busy`` workers with ``threads`` threads each compute at once.

    Attributes:
        pass_ms: a forward and a backward pass.
        update_ms: the update of the optimizer.
    """

    threads: int
    busy: int
    rows: int
    pass_ms: float
    update_ms: float


@dataclass(frozen=True, kw_only=True)
class GroupCost:
    """What a group of ``workers`` exchanges; the unit of size is a MiB of the whole tensor, on each of them."""

    workers: int
    all_reduce: Affine
    all_gather: Affine
    reduce_scatter: Affine


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The measurements of a job.

    Attributes:
        device: where the workers compute.
        divisions: the model as layers, for each number of stages.
        layer_rows: the number of samples with which the layers were measured.
        passes: the passes of the whole model; empty if it does not fit in the memory of a worker.
        parameter_bytes: the parameters of the model.
        gradient_bytes: the gradients that replicas exchange in a step.
        optimizer_bytes: the state of the optimizer for each byte of the parameters.
        activation_bytes: what a sample keeps in memory until the backward pass, for the whole model.
        data: the time to read and collate a batch; the unit of size is a sample.
        loop_ms: the training loop of a worker, around a step.
        bytes_by_group: the parameters that ``fsdp`` gathers together, of each of its groups; at the end, of the others.
        gathered_share: the part of these bytes that is gathered, less than 1 where parameters are cast before.
        groups: collective operations, by the size of the group; empty with one worker.
        message: a message between two workers; the unit of size is a MiB.
        server: what ``parameter_server`` adds to a step; the unit of size is a MiB of gradients that a server receives.
        base_ms: a pass of a model that computes nearly nothing, on one worker.
        ddp_ms: what a step of ``ddp`` on all workers takes longer than its passes, transfer and update together, as far
            as it was measured; may be negative.
        parts_ms: what a slice of ``fsdp`` on all workers takes longer than its passes, transfer and update together, as
            far as it was measured; may be negative.
        devices_ms: a step of ``dp`` on the devices of a worker; None where it was not measured.
        pipeline: what a pipeline adds to a step; the unit of size is a pass of a stage over a micro-batch.
        interleaved: the same, of a pipeline with several stages on each worker.
        free_bytes: the memory that is free on the node of a worker (CPU), or on its device.
    """

    device: Literal["cpu", "cuda"]
    divisions: tuple[StageDivision, ...]
    layer_rows: int
    passes: tuple[PassCost, ...]
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: float
    activation_bytes: float
    data: Affine
    loop_ms: float
    bytes_by_group: tuple[int, ...]
    gathered_share: float
    groups: tuple[GroupCost, ...]
    message: Affine
    server: Affine
    base_ms: float
    ddp_ms: float
    devices_ms: float | None
    parts_ms: float
    pipeline: Affine
    interleaved: Affine
    free_bytes: int

    def division(self, num_stages: int) -> StageDivision:
        """Return the model as layers for ``num_stages`` stages, or for the nearest number of which it was measured."""
        return min(self.divisions, key=lambda division: abs(division.num_stages - num_stages))

    @property
    def layers(self) -> tuple[LayerProfile, ...]:
        """The layers of the model in any division; empty if it cannot be cut."""
        return next((division.layers for division in self.divisions if division.layers), ())

    @property
    def cast_bytes(self) -> int:
        """The copies of the parameters that autocast makes for a pass of the whole model."""
        return sum(layer.cast_bytes for layer in self.layers)

    def pass_ms(self, rows: float, *, threads: int, busy: int) -> float:
        """Return the time of a forward and a backward pass of the whole model over ``rows`` samples."""
        if not self.passes:
            return math.fsum(layer.total_ms for layer in self.layers) * rows / self.layer_rows
        return self._interpolated(threads, busy, lambda costs: interpolate([(c.rows, c.pass_ms) for c in costs], rows))

    def update_ms(self, *, threads: int, busy: int) -> float:
        """Return the time of an update of all parameters."""
        if not self.passes:
            return 0.0
        return self._interpolated(threads, busy, lambda costs: statistics.median(c.update_ms for c in costs))

    def group(self, workers: int) -> GroupCost:
        """Return the costs of a group of ``workers``, or of the nearest number that was measured."""
        return min(self.groups, key=lambda group: abs(group.workers - workers))

    def _interpolated(self, threads: int, busy: int, value: Callable[[Sequence[PassCost]], float]) -> float:
        """Return ``value`` of the measurements with the nearest number of threads, interpolated over ``busy``."""
        nearest = min({c.threads for c in self.passes}, key=lambda measured: abs(measured - threads))
        costs = [c for c in self.passes if c.threads == nearest]
        counts = sorted({c.busy for c in costs})
        return interpolate([(n, value([c for c in costs if c.busy == n])) for n in counts], busy)


def interpolate(points: Sequence[tuple[float, float]], x: float) -> float:
    """Return the value at ``x`` of the line through the two ``points`` next to it; those are not negative."""
    ordered = sorted(points)
    if len(ordered) == 1:
        return ordered[0][1]
    right = min(max(1, bisect_left([a for a, _ in ordered], x)), len(ordered) - 1)
    (a, ya), (b, yb) = ordered[right - 1 : right + 1]
    return max(0.0, ya + (yb - ya) * (x - a) / (b - a))

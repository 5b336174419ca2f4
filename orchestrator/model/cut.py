"""Where a model is cut into stages: decisions on names and costs alone. Pure, no torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from orchestrator.config.build import did_you_mean

MEASURED_WITHIN = 0.02
"""Costs are measured, and say no more than this, as a fraction, about which of two stages is the dearer one."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A piece that is never cut. ``trainable``: some of its parameters are not frozen."""

    name: str
    num_parameters: int
    trainable: bool


@dataclass(frozen=True)
class Cut:
    """The index of the first layer of each stage, beginning with 0."""

    starts: tuple[int, ...]

    @property
    def num_stages(self) -> int:
        return len(self.starts)

    def layers_of(self, stage: int, num_layers: int) -> range:
        stop = self.starts[stage + 1] if stage + 1 < len(self.starts) else num_layers
        return range(self.starts[stage], stop)


def cut_at(layers: Sequence[Layer], names: Sequence[str], num_stages: int) -> tuple[Cut | None, list[str]]:
    """Stages that begin at the layers named; the first stage begins by itself. The cut, or the faults."""
    known = [layer.name for layer in layers]
    shown = f"strategy.split=[{','.join(names)}]"
    errors = [f"{shown}: {n}: no such layer; {did_you_mean(n, known)}" for n in names if n not in known]
    if len(names) != num_stages - 1:
        errors.append(f"{shown}: {num_stages} stages need {num_stages - 1} names, where each after the first begins")
    if errors:
        return None, errors
    starts = [known.index(name) for name in names]
    if any(b <= a for a, b in zip([0, *starts], starts, strict=False)):
        return None, [f"{shown}: give each once, after the first layer and in the model's order: {', '.join(known)}"]
    cut = Cut((0, *starts))
    for stage in range(num_stages):
        own = cut.layers_of(stage, len(layers))
        if not any(layers[i].num_parameters for i in own):
            listed = ", ".join(known[i] for i in own)
            return None, [f"{shown}: stage {stage} ({listed}) has no parameters; move a cut"]
    return cut, []


def balance(layers: Sequence[Layer], costs: Sequence[float], num_stages: int) -> Cut:
    """The cut whose dearest stage is cheapest, each stage with parameters.

    Among cuts that are as good, within ``MEASURED_WITHIN``, the one with the smallest sum of squares: the other stages
    are even too, and what is measured twice is cut the same way twice.

    Raises:
        ValueError: fewer layers with parameters than stages.
    """
    if (found := sum(layer.num_parameters > 0 for layer in layers)) < num_stages:
        raise ValueError(f"{found} layers with parameters, too few for {num_stages} stages")
    dearest, _ = _partition(layers, costs, num_stages, join=max, most=math.inf)
    _, starts = _partition(
        layers, costs, num_stages, join=lambda sum_, cost: sum_ + cost * cost, most=dearest * (1 + MEASURED_WITHIN)
    )
    return Cut(starts)


def _partition(
    layers: Sequence[Layer],
    costs: Sequence[float],
    num_stages: int,
    *,
    join: Callable[[float, float], float],
    most: float,
) -> tuple[float, tuple[int, ...]]:
    """The smallest total and the starts of its stages, none of which costs more than ``most``.

    ``join`` adds a stage's cost to a total. The classic partition of a sequence, by dynamic programming over (layers,
    stages).
    """
    n = len(layers)
    cost_before = list(itertools.accumulate(costs, initial=0.0))
    before = list(itertools.accumulate((layer.num_parameters for layer in layers), initial=0))
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}  # by the layers that the stages so far have
    for _ in range(num_stages):
        longer: dict[int, tuple[float, tuple[int, ...]]] = {}
        for begin, (total, starts) in best.items():
            for end in range(begin + 1, n + 1):
                cost = cost_before[end] - cost_before[begin]
                if before[end] == before[begin] or cost > most:
                    continue
                found = (join(total, cost), (*starts, begin))
                if end not in longer or found < longer[end]:
                    longer[end] = found
        best = longer
    return best[n]

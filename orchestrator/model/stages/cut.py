"""Where to cut a model into stages, by layer names or by cost. Pure functions without torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from orchestrator.config.text import did_you_mean

MEASURED_WITHIN = 0.02
"""The relative error of measured costs: stages whose costs differ by less count as equal."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A part of the model that is never cut. ``trainable`` is False if all its parameters are frozen."""

    name: str
    num_parameters: int
    trainable: bool


@dataclass(frozen=True)
class Cut:
    """A division of the layers into stages. ``starts`` holds the index of each stage's first layer; the first is 0."""

    starts: tuple[int, ...]

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.starts)

    def layers_of(self, stage: int, num_layers: int) -> range:
        """Return the indices of the layers in ``stage``; the model has ``num_layers``."""
        stop = self.starts[stage + 1] if stage + 1 < len(self.starts) else num_layers
        return range(self.starts[stage], stop)


def cut_at(layers: Sequence[Layer], names: Sequence[str], num_stages: int) -> tuple[Cut | None, list[str]]:
    """Cut a model before the layers that ``strategy.split`` names.

    Args:
        layers: the model's layers in order.
        names: the first layer of each stage but the first.
        num_stages: the number of stages.

    Returns:
        The cut and no errors, or None and the errors.
    """
    known = [layer.name for layer in layers]
    setting = f"strategy.split=[{','.join(names)}]"
    errors = [f"{setting}: {n}: no such layer; {did_you_mean(n, known)}" for n in names if n not in known]
    if len(names) != num_stages - 1:
        errors.append(
            f"{setting}: {num_stages} stages need {num_stages - 1} names, the first layer of each later stage"
        )
    if errors:
        return None, errors
    starts = [known.index(name) for name in names]
    if any(b <= a for a, b in zip([0, *starts], starts, strict=False)):
        return None, [
            f"{setting}: give each name once, in the model's order and not the first layer: {', '.join(known)}"
        ]
    cut = Cut((0, *starts))
    for stage in range(num_stages):
        own = cut.layers_of(stage, len(layers))
        if not any(layers[i].num_parameters for i in own):
            listed = ", ".join(known[i] for i in own)
            return None, [f"{setting}: stage {stage} ({listed}) has no parameters; name other layers"]
    return cut, []


def balance(layers: Sequence[Layer], costs: Sequence[float], num_stages: int) -> Cut:
    """Find the cut that minimises the cost of the most expensive stage, each stage having parameters.

    Among the cuts that are equally good within ``MEASURED_WITHIN``, choose the one with the smallest sum of squared
    costs. It evens out the other stages as well, and makes the result insensitive to measurement noise.

    Args:
        layers: the model's layers in order.
        costs: the cost of each layer, in any unit.
        num_stages: the number of stages.

    Raises:
        ValueError: there are fewer layers with parameters than stages.
    """
    if (found := sum(layer.num_parameters > 0 for layer in layers)) < num_stages:
        raise ValueError(f"{found} layers with parameters, too few for {num_stages} stages")
    bottleneck, _ = _partition(layers, costs, num_stages, add=max, limit=math.inf)
    _, starts = _partition(
        layers, costs, num_stages, add=lambda total, cost: total + cost * cost, limit=bottleneck * (1 + MEASURED_WITHIN)
    )
    return Cut(starts)


def _partition(
    layers: Sequence[Layer],
    costs: Sequence[float],
    num_stages: int,
    *,
    add: Callable[[float, float], float],
    limit: float,
) -> tuple[float, tuple[int, ...]]:
    """Find the smallest total of stage costs and the starts of the stages, by dynamic programming.

    The classic linear partition problem: the best partition of the first ``k`` layers into ``s`` stages extends a best
    partition of fewer layers into ``s - 1`` stages.

    Args:
        layers: the model's layers in order.
        costs: the cost of each layer.
        num_stages: the number of stages.
        add: returns a total with the cost of one more stage.
        limit: the highest cost that a stage may have.
    """
    n = len(layers)
    cost_before = list(itertools.accumulate(costs, initial=0.0))
    parameters_before = list(itertools.accumulate((layer.num_parameters for layer in layers), initial=0))
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}  # by the number of layers in the stages so far
    for _ in range(num_stages):
        extended: dict[int, tuple[float, tuple[int, ...]]] = {}
        for begin, (total, starts) in best.items():
            for end in range(begin + 1, n + 1):
                cost = cost_before[end] - cost_before[begin]
                if parameters_before[end] == parameters_before[begin] or cost > limit:
                    continue
                candidate = (add(total, cost), (*starts, begin))
                if end not in extended or candidate < extended[end]:
                    extended[end] = candidate
        best = extended
    return best[n]

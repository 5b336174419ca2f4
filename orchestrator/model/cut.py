"""Where a model is cut into stages: decisions on names and costs alone. Pure, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.config.build import did_you_mean


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A piece that is never cut. ``trainable``: it has parameters to train."""

    name: str
    trainable: bool
    num_parameters: int = 0


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
    faults = [f"{shown}: {n}: no such layer; {did_you_mean(n, known)}" for n in names if n not in known]
    if len(names) != num_stages - 1:
        faults.append(f"{shown}: {num_stages} stages need {num_stages - 1} names, where each after the first begins")
    if faults:
        return None, faults
    starts = [known.index(name) for name in names]
    if any(b <= a for a, b in zip([0, *starts], starts, strict=False)):
        return None, [f"{shown}: give each once, after the first layer and in the model's order: {', '.join(known)}"]
    cut = Cut((0, *starts))
    for stage in range(num_stages):
        own = cut.layers_of(stage, len(layers))
        if not any(layers[i].trainable for i in own):
            listed = ", ".join(known[i] for i in own)
            return None, [f"{shown}: stage {stage} ({listed}) has no parameters to train; move a cut"]
    return cut, []


def balance(layers: Sequence[Layer], costs: Sequence[float], num_stages: int) -> Cut:
    """The cut whose dearest stage is cheapest, each stage with something to train.

    The classic partition of a sequence, by dynamic programming over (layers, stages). Among equal cuts the one
    with the smallest sum of squares, which keeps the other stages even too.

    Raises:
        ValueError: fewer trainable layers than stages.
    """
    n = len(layers)
    prefix_cost, prefix_trainable = [0.0], [0]
    for layer, cost in zip(layers, costs, strict=True):
        prefix_cost.append(prefix_cost[-1] + cost)
        prefix_trainable.append(prefix_trainable[-1] + layer.trainable)
    if prefix_trainable[-1] < num_stages:
        raise ValueError(f"{prefix_trainable[-1]} layers with parameters to train, too few for {num_stages} stages")
    # best[end] = (dearest stage, sum of squares, starts) of layers[:end] in the stages so far
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for _ in range(num_stages):
        longer: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for begin, (dearest, squares, starts) in best.items():
            for end in range(begin + 1, n + 1):
                if prefix_trainable[end] == prefix_trainable[begin]:
                    continue
                cost = prefix_cost[end] - prefix_cost[begin]
                found = (max(dearest, cost), squares + cost * cost, (*starts, begin))
                if end not in longer or found < longer[end]:
                    longer[end] = found
        best = longer
    return Cut(best[n][2])

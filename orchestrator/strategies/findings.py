"""What the ranks of a run compute otherwise than the whole model, and how a user is told of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from orchestrator.strategies.undivided import EVALUATION, NORM, Passed
from orchestrator.strategies.whole_exchange import dense, distance, largest_of, relative

FACTOR = 8
"""By how much more than the largest effect of another rounding something may differ."""


@dataclass(frozen=True, kw_only=True)
class Apart:
    """What differs from the whole model.

    Attributes:
        kind: ``gradient``, ``buffer`` or ``figure``.
        name: of the parameter, the buffer or the figure.
        by: the largest difference, relative to the largest entry.
    """

    kind: str
    name: str
    by: float

    @property
    def is_gradient(self) -> bool:
        """Whether it is a gradient, or their norm."""
        return self.kind == "gradient" or self.name == NORM


def difference(found: Tensor, wanted: Tensor) -> float:
    """Return the largest difference of two tensors, relative to the largest entry of what is ``wanted``."""
    found, wanted = dense(found), dense(wanted)
    return relative(distance(found, wanted), largest_of(wanted))


def apart_from(expected: Passed, found: Passed, one: Apart) -> float:
    """Return by how much another pass through the whole model makes something differ, as ``one`` does."""
    match one.kind:
        case "figure":
            return figure_apart(found.figures.get(one.name), expected.figures[one.name])
        case "gradient":
            assert found.gradients is not None
            return found.gradients.differences.get(one.name, 0.0)
    wanted, other = expected.buffers.get(one.name), found.buffers.get(one.name)
    if wanted is None or other is None:
        return 0.0 if wanted is other else math.inf
    return difference(other, wanted)


def figure_apart(found: float | None, wanted: float) -> float:
    """Return the relative difference of two numbers."""
    return math.inf if found is None else relative(abs(found - wanted), abs(wanted))


def figures_of(ranks: Iterable[Mapping[str, Mapping[str, float]]]) -> dict[str, float]:
    """Return the figures of a run, given the sums of its ranks: of the ``train`` pass, and of the evaluation."""
    sums: dict[str, dict[str, float]] = {"train": {}, EVALUATION: {}}
    norm = None
    for rank in ranks:
        for part, total in sums.items():
            for name, value in rank[part].items():
                total[name] = total.get(name, 0.0) + value
        norm = rank["train"].get(NORM, norm)
    train = means(sums["train"])
    return {**train, **({} if norm is None else {NORM: norm}), **means(sums[EVALUATION], prefix=f"{EVALUATION} ")}


def means(sums: Mapping[str, float], *, prefix: str = "") -> dict[str, float]:
    """Return the means, by name, given sums and what they are divided by, ``weight``."""
    weight = sums.get("weight") or 1.0
    return {f"{prefix}{name}": value / weight for name, value in sums.items() if name not in ("weight", NORM)}


def text_of(
    differing: Sequence[Apart],
    model: nn.Module,
    *,
    by: str,
    remedy: str,
    samples: int,
    figures: Mapping[str, float],
    expected: Mapping[str, float],
) -> str:
    """Return the error about what differs.

    Args:
        differing: what does.
        model: the whole model.
        by: the keys that divide it.
        remedy: what trains it.
        samples: the number of samples that were compared.
        figures: the numbers of the run.
        expected: those of the whole model.
    """
    numbers = {one.name: figures.get(one.name, math.nan) for one in differing if one.kind == "figure"}
    says = [f"the {name} is {number:.6g} instead of {expected[name]:.6g}" for name, number in numbers.items()]
    for kind, verb in (("gradient", "the gradient of"), ("buffer", "what forward() leaves in")):
        worst = sorted((one for one in differing if one.kind == kind), key=lambda one: -one.by)
        if worst:
            owner = type(model.get_submodule(worst[0].name.rpartition(".")[0])).__name__
            others = f", and {len(worst) - 1} more" if len(worst) > 1 else ""
            says.append(f"{verb} {worst[0].name} ({owner}) is off by {_share(worst[0].by)}{others}")
    return f"{by}: the workers would train another model. Of {samples} samples, {'; '.join(says)}. {remedy}"


def _share(by: float) -> str:
    return f"{by:.1%} of its largest entry" if math.isfinite(by) else "what is no number"

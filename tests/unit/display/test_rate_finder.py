"""The rate finder: where the loss falls fastest, up to where it diverges."""

import math
from pathlib import Path

import pytest

from orchestrator.display.rate_finder import draw, find, running_means

Points = list[tuple[int, float, dict[str, float]]]


def points(*, steepest: float = -2.0, diverges: float = 0.5, steps: int = 100) -> Points:
    """A loss that falls from 2 to 1 around a rate of ``10**steepest``, and grows from ``10**diverges`` on.

    The rate that is logged after a step is that of the next one.
    """
    logged: Points = []
    for step in range(1, steps + 1):
        exponent = -7 + 8 * (step - 1) / (steps - 1)
        loss = 1 + 1 / (1 + math.exp(6 * (exponent - steepest))) + max(0.0, exponent - diverges) * 100
        following = 10 ** (-7 + 8 * step / (steps - 1))
        logged.append((step, 0.0, {"train/loss": loss + 0.01 * (-1) ** step, "train/lr": following}))
    return logged


@pytest.mark.parametrize("steepest", [-4.0, -2.0, -1.0])
def test_the_rate_where_the_loss_falls_fastest_is_suggested(steepest: float, tmp_path: Path) -> None:
    found = find(points(steepest=steepest))
    assert found.suggested is not None
    assert math.log10(found.suggested) == pytest.approx(steepest, abs=0.2)
    assert max(found.rates) < 10**0.7, "what has diverged is left out"
    draw(found, tmp_path / "found.png")
    assert (tmp_path / "found.png").read_bytes().startswith(b"\x89PNG")


def test_steps_without_a_loss_and_losses_that_are_not_finite_are_left_out() -> None:
    whole = points()
    skipped: Points = [
        (step, at, {"train/lr": m["train/lr"]} if step > 90 else m | ({"train/loss": math.inf} if step == 50 else {}))
        for step, at, m in whole
    ]
    found = find(skipped)
    assert len(found.rates) == 88


def test_too_few_points_or_a_loss_that_rises_suggest_nothing() -> None:
    assert find(points()[:9]) is None
    rising = find([(s, 0.0, {"train/loss": 1 + s / 100, "train/lr": 1e-3}) for s in range(1, 40)])
    assert rising.suggested is None


def test_means_move_no_place() -> None:
    line = [float(i) for i in range(60)]
    assert running_means(line) == pytest.approx(line)

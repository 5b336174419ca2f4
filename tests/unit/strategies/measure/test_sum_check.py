"""A metric that is not a sum over the samples is found in the first batches, and sums are not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from orchestrator.strategies.measure.job_metrics import MOST_LOOKED_AT, SumCheck

TARGET = torch.tensor([1, 1, 0, 1, 0, 1, 1, 0])
OUTPUT = torch.tensor([0.9, 0.2, 0.8, 0.7, 0.1, 0.6, 0.3, 0.4])


def f1(output: Tensor, target: Tensor) -> Tensor:
    found = output > 0.5
    return 2 * (found & (target == 1)).sum() / (found.sum() + target.sum())


def checked(measure: Callable[[Tensor, Tensor], Any], output: Any = OUTPUT, batches: int = 1) -> str | None:
    check = SumCheck("metrics", lambda output, target: {"m": torch.as_tensor(measure(output, target))})
    for _ in range(batches):
        check(output, TARGET)
    return check.warning


@pytest.mark.parametrize(
    "measure",
    [
        lambda output, target: ((output > 0.5) == target).sum(),
        lambda output, target: (output - target).square().sum(),
        lambda output, target: len(target),
        lambda output, target: output.sum() * 0,
        lambda output, target: torch.nan,
    ],
    ids=["correct", "squares", "samples", "nothing", "nan"],
)
def test_sums_are_taken(measure: Callable[[Tensor, Tensor], Any]) -> None:
    assert checked(measure, batches=MOST_LOOKED_AT + 1) is None


@pytest.mark.parametrize(
    ("measure", "numbers"),
    [
        (f1, "0.666667 for 8 of them and 0.666667 and 0.666667 for their halves"),
        (lambda output, target: ((output > 0.5) == target).float().mean(), "0.625 for 8 of them and 0.5 and 0.75"),
        (lambda output, target: output.max(), "0.9 for 8 of them and 0.9 and 0.6"),
    ],
    ids=["f1", "mean", "maximum"],
)
def test_what_is_no_sum_is_named(measure: Callable[[Tensor, Tensor], Any], numbers: str) -> None:
    said = checked(measure)
    assert said.startswith("job.metrics: 'm' is not a sum over the samples, ")
    assert numbers in said


def test_a_metric_that_begins_with_0_is_looked_at_again() -> None:
    check = SumCheck("metrics", lambda output, target: {"f1": f1(output, target)})
    check(OUTPUT * 0, TARGET)
    assert check.warning is None
    check(OUTPUT, TARGET)
    assert check.warning is not None


def test_what_cannot_be_halved_is_measured_alone() -> None:
    seen: list[Any] = []
    check = SumCheck("metrics", lambda output, target: seen.append(output) or {"m": torch.ones(())})
    check({"loss": torch.ones(()), "scores": OUTPUT}, TARGET)
    check(OUTPUT[:1], TARGET[:1])
    assert len(seen) == 2


def test_random_numbers_go_on_as_without_a_look() -> None:
    check = SumCheck("metrics", lambda output, target: {"m": torch.rand(())})
    torch.manual_seed(1)
    check(OUTPUT, TARGET)
    after = torch.rand(())
    torch.manual_seed(1)
    torch.rand(())
    assert torch.equal(after, torch.rand(()))

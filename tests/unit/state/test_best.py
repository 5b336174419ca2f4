"""The best evaluation so far, and the end of a run that no longer improves."""

import json
import math
from collections.abc import Sequence
from typing import Literal

import pytest

from orchestrator.state.best import BEST, BestSoFar, best_steps

INF = math.inf


def after(
    values: Sequence[float], *, direction: Literal["minimize", "maximize"] = "minimize", min_delta: float = 0.0
) -> BestSoFar:
    """The best of evaluations at the steps 10, 20, ..."""
    best = BestSoFar(metric="val/loss", direction=direction)
    for number, value in enumerate(values, start=1):
        best = best.after(10 * number, value, min_delta=min_delta)
    return best


@pytest.mark.parametrize(
    ("values", "direction", "step", "since"),
    [
        ([3.0, 2.0, 1.0], "minimize", 30, 0),
        ([3.0, 2.0, 2.0, 2.5], "minimize", 20, 2),  # the first of equal ones
        ([0.1, 0.9, 0.5], "maximize", 20, 1),
        ([math.nan, 3.0, math.nan, -INF], "minimize", 20, 2),
        ([math.nan, math.nan], "minimize", 0, 2),
        ([], "minimize", 0, 0),
    ],
)
def test_the_best_is_the_first_of_the_best_finite_values(
    values: list[float], direction: Literal["minimize", "maximize"], step: int, since: int
) -> None:
    best = after(values, direction=direction)
    assert (best.step, best.evaluations_since) == (step, since)
    assert best.value == (values[step // 10 - 1] if step else None)


def test_small_gains_are_the_best_but_do_not_keep_a_run_alive() -> None:
    best = after([1.0, 0.95, 0.92], min_delta=0.1)
    assert (best.step, best.value, best.evaluations_since) == (30, 0.92, 2)
    assert after([1.0, 0.95, 0.89], min_delta=0.1).evaluations_since == 0  # by more than 0.1 since the first one


@pytest.mark.parametrize(("stop_after", "stops"), [(None, False), (3, False), (2, True), (1, True)])
def test_a_run_ends_after_so_many_evaluations_without_an_improvement(stop_after: int | None, stops: bool) -> None:
    assert (after([2.0, 1.0, 1.5, 1.25]).why_stop(stop_after) is not None) == stops


def test_the_reason_names_key_metric_and_best() -> None:
    assert after([2.0, 1.0, 1.5, 1.25]).why_stop(2) == (
        "train.stop_after=2: val/loss has not improved in the last 2 evaluations; its best is 1 at step 20"
    )
    assert after([math.nan]).why_stop(1) == (
        "train.stop_after=1: val/loss has not improved in the last evaluation; none was finite"
    )


def test_an_evaluation_that_is_repeated_counts_once() -> None:
    best = after([2.0, 1.0, 1.5])
    assert best.after(30, 0.5, min_delta=0) == best
    assert best.after(40, 0.5, min_delta=0).step == 40


def test_it_survives_a_checkpoint() -> None:
    best = after([2.0, 1.0, 1.5])
    meta = json.loads(json.dumps({BEST: best.to_json()}))
    assert BestSoFar.from_meta(meta) == best


@pytest.mark.parametrize("meta", [{}, {BEST: {}}, {BEST: None}])
def test_a_checkpoint_without_a_best_has_none(meta: dict[str, object]) -> None:
    assert BestSoFar.from_meta(meta) is None


@pytest.mark.parametrize(
    ("saved", "step", "value"),
    [
        ([10, 20, 30, 40], 40, 0.5),
        ([10, 20, 30], 20, 1.0),  # that of step 40 could not be written
        ([30], 30, 1.5),  # never the best, but evaluated
        ([10, 25, 30], 30, 1.5),  # no evaluation after step 25
        ([25], 0, None),
        ([], 0, None),
    ],
)
@pytest.mark.parametrize("direction", ["minimize", "maximize"])
def test_the_best_of_those_that_are_saved_takes_the_place_of_one_that_is_not(
    saved: list[int], step: int, value: float | None, direction: Literal["minimize", "maximize"]
) -> None:
    sign = 1 if direction == "minimize" else -1
    values = [sign * v for v in (2.0, 1.0, 1.5, 0.5)]
    seen = {s: after(values[: s // 10], direction=direction) for s in saved}
    found = after(values, direction=direction).among(saved, seen.__getitem__)
    assert (found.step, found.value) == (step, None if value is None else sign * value)
    assert found.evaluations_since == 0


def test_an_evaluation_of_another_metric_does_not_count() -> None:
    other = BestSoFar(metric="val/accuracy", direction="minimize").after(10, 0.1, min_delta=0)
    assert after([2.0, 1.0]).among([10], lambda step: other).step == 0


def test_a_run_without_a_value_yet_continues_from_the_best_that_an_earlier_part_has_saved() -> None:
    seen = {10: after([2.0]), 20: after([2.0, 1.0]), 30: None, 40: BestSoFar(metric="val/f1", direction="maximize")}
    for values in ([], [math.nan]):
        found = after(values).among(seen, seen.get)
        assert (found.step, found.value, found.bar) == (20, 1.0, None)


F1 = BestSoFar(metric="val/f1", direction="maximize")


@pytest.mark.parametrize(
    ("later", "newest", "kept"),
    [
        ({}, None, {20}),
        ({40: None, 50: None}, None, {20}),  # resumed without checkpoint.best
        ({40: F1.after(40, 0.9, min_delta=0), 50: None}, None, {20, 40}),  # by another metric
        ({40: None}, F1.after(50, 0.9, min_delta=0), {20, 0}),  # whose best was not saved
        ({40: after([2.0, 1.0, 1.5, 0.5])}, None, {40}),
        ({40: after([2.0, 1.0, 1.5, 0.5], direction="maximize")}, None, {20, 40}),
    ],
)
def test_each_metric_that_a_part_of_the_run_has_followed_keeps_its_best(
    later: dict[int, BestSoFar | None], newest: BestSoFar | None, kept: set[int]
) -> None:
    saved = {20: after([2.0, 1.0]), 30: after([2.0, 1.0, 1.5])}
    assert best_steps(saved | later, newest) == kept

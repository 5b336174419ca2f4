"""Schedules under ideal conditions, by torch's own lists of their actions, against the formulas of the papers."""

import pytest

from helpers.ranks.schedules import live_microbatches
from orchestrator.compat.pipelining import computations
from orchestrator.timeline import bubble, order_of, simulate, theoretical_bubble

GRIDS = [(2, 4), (4, 8), (4, 16), (8, 16)]
"""``(workers, microbatches)``"""


def model_bubble(schedule: str, p: int, m: int, v: int = 1) -> float:
    return bubble(simulate(computations(schedule, p, m, v)))


@pytest.mark.parametrize(("p", "m"), GRIDS)
@pytest.mark.parametrize(("schedule", "v"), [("GPipe", 1), ("1F1B", 1), ("Interleaved1F1B", 2), ("Interleaved1F1B", 3)])
def test_bubbles_are_those_of_the_formulas(schedule: str, v: int, p: int, m: int) -> None:
    assert model_bubble(schedule, p, m, v) == pytest.approx((p - 1) / (v * m + p - 1))


@pytest.mark.parametrize(("p", "m"), GRIDS)
@pytest.mark.parametrize("schedule", ["InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"])
def test_zero_bubble_schedules_wait_one_unit_for_each_worker_behind(schedule: str, p: int, m: int) -> None:
    """F + I - W, where a micro-batch takes each worker 6 units over its two stages; with m >= 2 p."""
    assert model_bubble(schedule, p, m, 2) == pytest.approx((p - 1) / (6 * m + p - 1))


def test_a_backward_pass_is_two_forward_passes() -> None:
    spans = simulate(computations("GPipe", 2, 2))
    assert [(s.kind, s.start, s.end) for s in spans[0]] == [("F", 0, 1), ("F", 1, 2), ("B", 5, 7), ("B", 7, 9)]
    assert [(s.kind, s.start, s.end) for s in spans[1]] == [("F", 1, 2), ("F", 2, 3), ("B", 3, 5), ("B", 5, 7)]


def test_one_microbatch_is_the_naive_split() -> None:
    assert model_bubble("GPipe", 4, 1) == pytest.approx(3 / 4)


@pytest.mark.parametrize(("p", "m"), GRIDS)
def test_1f1b_holds_a_microbatch_for_each_stage_behind_and_gpipe_all(p: int, m: int) -> None:
    held = [live_microbatches(order) for order in computations("1F1B", p, m)]
    assert held == [{stage: p - stage} for stage in range(p)]
    assert [live_microbatches(order) for order in computations("GPipe", p, m)] == [{stage: m} for stage in range(p)]


def test_half_a_backward_pass_holds_on_to_the_activations() -> None:
    assert live_microbatches([("F", 0, 0), ("I", 0, 0), ("F", 0, 1), ("W", 0, 0), ("F", 0, 2)]) == {0: 2}


def test_the_slices_of_a_step_follow_one_another_without_a_gap_of_their_own() -> None:
    """With the pipeline flushed between them, as GPipe and 1F1B do it, the bubble is that of one slice."""
    twice = [
        [(kind, stage, number + 8 * part) for part in (0, 1) for kind, stage, number in order]
        for order in computations("1F1B", 4, 8)
    ]
    assert bubble(simulate(twice)) == pytest.approx(3 / 11)


def test_only_the_order_of_spans_counts() -> None:
    spans = simulate(computations("1F1B", 4, 8))
    assert [order_of(reversed(worker)) for worker in spans] == computations("1F1B", 4, 8)
    assert theoretical_bubble(spans) == pytest.approx(3 / 11)


def test_an_order_that_cannot_be_is_told() -> None:
    with pytest.raises(ValueError, match=r"\('B', 0, 0\)"):
        simulate([[("F", 0, 0), ("B", 0, 0)], [("F", 1, 0)]])

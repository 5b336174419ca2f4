"""Summaries of the values of a metric in bounded memory."""

import math
import random

import pytest

from orchestrator.policy.aggregate import MOST_KEPT, RunningValues, percentile


def test_percentile_is_nearest_rank() -> None:
    assert percentile([3.0, 1.0, 2.0, 4.0], 0.95) == 4.0
    assert percentile([1.0], 0.95) == 1.0
    assert math.isclose(percentile([float(i) for i in range(1, 101)], 0.95), 95.0)


def test_some_values_are_summarised_exactly() -> None:
    values = RunningValues()
    values.extend(float(n) for n in range(MOST_KEPT, 0, -1))
    assert values.derive("median") == (MOST_KEPT + 1) / 2
    assert values.derive("p95") == math.ceil(0.95 * MOST_KEPT)


@pytest.mark.slow
def test_a_long_run_is_summarised_from_all_its_parts() -> None:
    values, count = RunningValues(), 40 * MOST_KEPT
    shuffled = random.Random(1).sample(range(1, count + 1), count)
    values.extend(float(n) for n in shuffled)
    assert values.derive("median") == pytest.approx(0.5 * count, rel=0.024)
    assert values.derive("p95") == pytest.approx(0.95 * count, rel=0.0053)
    assert values.derive("harmonic_mean") == pytest.approx(count / math.fsum(1 / n for n in shuffled))


def test_a_rate_of_zero_has_no_mean_and_nothing_no_summary() -> None:
    values = RunningValues()
    assert values.derive("median") is None
    values.extend([2.0, 0.0])
    assert values.derive("harmonic_mean") == 0.0

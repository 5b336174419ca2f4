"""Samples that are drawn by their weights."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from helpers.ranks.batches import LAYOUTS, Numbers, Streamed, read_by_all_ranks
from orchestrator.worker.data.batches import SampleOrder, checked_weights

WEIGHTS = torch.tensor([5.0, 1.0, 0.0, 1.0] * 25, dtype=torch.float64)


def test_samples_are_drawn_in_proportion_to_their_weights() -> None:
    order = SampleOrder(n=100, seed=1, weights=WEIGHTS)
    drawn = Counter(i % 4 for i in order.indices(0, 70_000))
    assert drawn[2] == 0
    assert drawn[0] / 70_000 == pytest.approx(5 / 7, abs=0.01)
    assert drawn[1] / drawn[3] == pytest.approx(1, abs=0.1)
    assert order.indices(70_000, 100) != order.indices(70_100, 100), "each epoch is drawn anew"
    assert order.indices(70_000, 100) != SampleOrder(n=100, seed=2, weights=WEIGHTS).indices(70_000, 100)


def test_the_last_weights_may_be_zero() -> None:
    weights = torch.tensor([0.0, 3.0, 0.0, 0.0], dtype=torch.float64)
    assert SampleOrder(n=4, seed=0, weights=weights).indices(0, 40) == [1] * 40


def test_samples_of_weight_0_are_not_drawn_at_the_ends_either(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = torch.tensor([0.0, 1.0, 0.5, 0.0], dtype=torch.float64)
    monkeypatch.setattr(torch, "rand", lambda *_, **__: ends)
    weights = torch.tensor([0.0, 3.0, 0.0, 0.0], dtype=torch.float64)
    assert SampleOrder(n=4, seed=0, weights=weights).indices(0, 4) == [1] * 4


@pytest.mark.parametrize(("dp_size", "accumulation"), LAYOUTS)
def test_any_layout_draws_the_same_and_resumes_at_the_next_sample(dp_size: int, accumulation: int) -> None:
    whole = SampleOrder(n=100, seed=0, weights=WEIGHTS).indices(0, 39 * 6)
    rest = read_by_all_ranks(
        lambda: Numbers(100),
        data_parallel_size=dp_size,
        grad_accumulation=accumulation,
        global_batch_size=39,
        samples_consumed=39 * 2,
        steps=4,
        weights=WEIGHTS,
    )
    assert [i for step in rest for i in step] == whole[39 * 2 :]


def test_weights_of_many_kinds_are_accepted() -> None:
    for weights in ([1, 0, 2], torch.tensor([1, 0, 2]), torch.tensor([1.0, 0.0, 2.0]).numpy()):
        checked = checked_weights(weights, Numbers(3))
        assert checked is not None
        assert checked.tolist() == [1, 0, 2]
    assert checked_weights(None, Numbers(3)) is None


@pytest.mark.parametrize(
    ("weights", "dataset", "message"),
    [
        ([1.0, 2.0], Numbers(3), r"shape \(2,\), but the dataset has 3 samples"),
        ([1.0, -2.0, 1.0], Numbers(3), "weights must be finite and at least 0"),
        ([1.0, float("nan"), 1.0], Numbers(3), "weights must be finite and at least 0"),
        ([0.0, 0.0, 0.0], Numbers(3), "weights must be .* one of them greater than 0"),
        ([1.0] * 5, Streamed(), "the samples of a stream cannot be drawn by weight"),
    ],
)
def test_weights_that_do_not_fit_are_refused(weights: Any, dataset: Any, message: str) -> None:
    with pytest.raises(ValueError, match=rf"^job\.sample_weights\('train'\): {message}"):
        checked_weights(weights, dataset)

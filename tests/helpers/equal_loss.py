"""The rule of equal loss, for replicas of the whole model. ``layouts`` has it for every strategy."""

from __future__ import annotations

import torch

from helpers.cases import Case
from helpers.gang import Gang
from helpers.training import Steps, assert_same, losses, train


def assert_equal_losses(gang: Gang, case: Case, world_sizes: tuple[int, ...], *, rtol: float) -> list[Steps]:
    """Compare replicas with one worker, by loss at every step and final model; returns what the last replicas saw."""
    (alone,) = gang.run(train, case, world_size=1)
    expected = losses([alone])
    assert len(expected) == case.train.steps == 20
    assert expected[-1] < expected[0], "nothing was learned, so nothing is compared"
    for world_size in world_sizes:
        ranks = gang.run(train, case, world_size=world_size)
        torch.testing.assert_close(losses(ranks), expected, rtol=rtol, atol=0)
        assert sum(r.weights[0] for r in ranks) == alone.weights[0]
        for rank in ranks:
            assert_same(rank.model, ranks[0].model)
        torch.testing.assert_close(ranks[0].model, alone.model, rtol=100 * rtol, atol=10 * rtol)
    return ranks

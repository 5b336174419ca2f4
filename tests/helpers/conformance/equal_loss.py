"""The rule of equal loss, for replicas of the whole model. ``layouts`` has it for every strategy."""

import torch

from helpers.conformance.cases import Case
from helpers.conformance.training import Steps, assert_same, losses, metrics_of, train
from helpers.ranks.gang import Gang


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


def assert_equal_steps(
    gang: Gang, case: Case, *world_sizes: int, want_grad_norm: bool = True, rtol: float = 1e-5
) -> list[Steps]:
    """Compare ``ddp`` with ``single`` for a job that makes its own updates; what the last ranks saw."""
    (alone,) = gang.run(train, case, want_grad_norm, world_size=1)
    assert len(set(alone.loss_sums)) == case.train.steps, "nothing changes, so nothing is compared"
    for world_size in world_sizes:
        ranks = gang.run(train, case, want_grad_norm, world_size=world_size)
        torch.testing.assert_close(losses(ranks), losses([alone]), rtol=rtol, atol=0)
        torch.testing.assert_close(metrics_of(ranks), metrics_of([alone]), rtol=rtol, atol=0)
        torch.testing.assert_close(ranks[0].model, alone.model, rtol=10 * rtol, atol=rtol)
        for rank in ranks:
            assert_same(rank.model, ranks[0].model)
            torch.testing.assert_close(rank.norms, alone.norms, rtol=100 * rtol, atol=0)
    return ranks

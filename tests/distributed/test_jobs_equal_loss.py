"""The jobs that ship, under the rule of equal loss."""

from __future__ import annotations

import pytest
import torch
from test_equal_loss import SGD, assert_equal_losses
from toys import Case, having, losses, train

from jobs.resnet50 import ResNet50
from jobs.toy import Toy


def test_resnet50_on_two_workers_is_one_worker_with_two_micro_batches(gang):
    """BatchNorm's statistics are those of the images that pass together."""
    job = ResNet50(width=4, blocks=(1, 1, 1, 1), num_classes=10, num_images=40, lr=0.02)
    whole = having(steps=10, global_batch_size=20)
    halves = having(whole, grad_accumulation=2)
    (alone,) = gang.run(train, Case(job=job, train=halves), world_size=1)
    ranks = gang.run(train, Case(job=job, train=whole), world_size=2)
    torch.testing.assert_close(losses(ranks), losses([alone]), rtol=SGD, atol=0)
    for rank in ranks:
        for name, _ in job.model().named_parameters():
            torch.testing.assert_close(rank.model[name], alone.model[name], rtol=1e-3, atol=1e-4)
    (undivided,) = gang.run(train, Case(job=job, train=whole), world_size=1)
    assert (losses([undivided]) - losses([alone])).abs().max() > 1e-3, "the statistics make no difference"


@pytest.mark.parametrize("grad_accumulation", [1, 2])
def test_toy(gang, grad_accumulation):
    case = Case(job=Toy(), train=having(global_batch_size=30, grad_accumulation=grad_accumulation))
    assert_equal_losses(gang, case, (2, 4), rtol=SGD)

"""Optimizers that update all parameters with one kernel."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from orchestrator.state.train_state import capture, restore
from orchestrator.strategies.update.job_optimizer import fuse_updates, sparse_parameters


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))


def update(net: nn.Module, optimizer: Optimizer) -> None:
    optimizer.zero_grad()
    net(torch.ones(3, 4)).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("make", "fused"),
    [
        (lambda p: AdamW(p), True),
        (lambda p: SGD(p, lr=0.1, momentum=0.9), True),
        (lambda p: Adam(p, foreach=True), None),
        (lambda p: Adam(p, fused=False), False),
        (lambda p: RMSprop(p), None),
    ],
    ids=["adamw", "sgd", "foreach-chosen", "not-fused-chosen", "class-without"],
)
def test_a_group_is_fused_unless_the_job_has_chosen_or_the_class_cannot(
    make: Callable[[list[Tensor]], Optimizer], fused: Any
) -> None:
    optimizer = make(list(model().parameters()))
    fuse_updates(optimizer)
    assert optimizer.param_groups[0].get("fused") is fused


def test_a_group_with_a_sparse_or_distant_parameter_is_not_fused() -> None:
    table, dense = nn.Embedding(5, 3, sparse=True), nn.Linear(3, 3)
    assert sparse_parameters([nn.Sequential(table, dense)]) == [table.weight]
    distant = nn.Parameter(torch.empty(3, device="meta"))
    groups = [
        {"params": [table.weight, dense.bias]},
        {"params": [dense.weight]},
        {"params": [nn.Parameter(torch.ones(3)), distant]},
    ]
    optimizer = SGD(groups, lr=0.1)
    fuse_updates(optimizer, sparse=[table.weight])
    assert [group["fused"] for group in optimizer.param_groups] == [None, True, None]


def test_fused_updates_are_those_of_the_job_and_continue_a_checkpoint_without_them() -> None:
    plain, fused = model(), model()
    optimizers = AdamW(plain.parameters()), AdamW(fused.parameters())
    update(plain, optimizers[0])
    fuse_updates(optimizers[1])
    restore(capture(plain, optimizers[0], None, step=1, samples_consumed=3), fused, optimizers[1], None)
    assert optimizers[1].param_groups[0]["fused"]
    for _ in range(3):
        update(plain, optimizers[0])
        update(fused, optimizers[1])
    torch.testing.assert_close(dict(fused.named_parameters()), dict(plain.named_parameters()))

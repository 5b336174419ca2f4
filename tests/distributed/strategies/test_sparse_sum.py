"""Sparse gradients are summed by exchanging rows, which every backend can do."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import helpers.jobs.stage_toys as of
from helpers.conformance.cases import DDP, Case, having
from helpers.conformance.equal_loss import assert_equal_losses
from helpers.conformance.layouts import SGD
from helpers.conformance.training import losses, make, steps, train
from helpers.jobs.toys import Tokens
from helpers.ranks.launches import recorded
from jobs.sparse import SparseLogistic
from orchestrator.strategies.update.gradients import sparse_sum

ROWS, WIDTH = 7, 3
UNEVEN: tuple[tuple[int, ...], ...] = ((), (0, 6, 6, 2), (6, 1))
"""The rows that each rank has, from none to several entries for one row."""


def own(rank: int, rows: tuple[tuple[int, ...], ...], dtype: torch.dtype) -> Tensor:
    indices = torch.tensor([rows[rank]], dtype=torch.int64)
    values = torch.arange(indices.numel() * WIDTH, dtype=dtype).reshape(-1, WIDTH) + 10 * rank
    return torch.sparse_coo_tensor(indices, values, (ROWS, WIDTH), check_invariants=True)


def summed(rank: int, rows: tuple[tuple[int, ...], ...], dtype: torch.dtype) -> Tensor:
    total = sparse_sum(own(rank, rows, dtype))
    assert total.is_coalesced()
    return total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [UNEVEN, ((), (), ())], ids=["uneven", "none"])
def test_the_sum_is_exact_whatever_rows_the_ranks_have(gang, rows, dtype):
    expected = torch.stack([own(rank, rows, dtype).to_dense() for rank in range(3)]).sum(0)
    for total in gang.run(summed, rows, dtype, world_size=3):
        assert total.dtype == dtype
        assert torch.equal(total.to_dense(), expected)


def operations(rank: int, case: Case) -> list[str]:
    strategy = make(case, rank)
    with recorded() as launches:
        for _ in steps(strategy):
            pass
    return [operation.name for launch in launches for operation in launch]


LOGISTIC = SparseLogistic(features=500, words=20, samples=400)


def test_ddp_gathers_indices_and_values_and_reduces_what_is_dense(gang):
    dense = sum(p.requires_grad for n, p in LOGISTIC.model().named_parameters()) - 1
    for names in gang.run(operations, Case(job=LOGISTIC, train=having(steps=1)), world_size=2):
        assert names.count("allgather") == 3
        assert names.count("allreduce") == dense


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_model_with_sparse_and_dense_gradients_has_equal_losses(gang, world_size):
    case = Case(job=Tokens(build=of.sparse_ends, momentum=0), train=having(global_batch_size=30))
    assert_equal_losses(gang, case, (world_size,), rtol=SGD)


def test_sparse_gradients_in_half_precision_are_close(gang):
    case = Case(job=replace(LOGISTIC, algorithm="sgd", lr=0.02), train=having(global_batch_size=100))
    plain = losses(gang.run(train, case, world_size=2))
    ranks = gang.run(train, replace(case, options=replace(DDP, comm_hook="bf16")), world_size=2)
    assert not torch.equal(losses(ranks), plain)
    torch.testing.assert_close(losses(ranks), plain, rtol=2e-2, atol=0)

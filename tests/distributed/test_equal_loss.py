"""The rule of equal loss: every layout has the losses of one worker, at every step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from helpers.cases import Case, having
from helpers.equal_loss import assert_equal_losses
from helpers.layouts import ADAMW, SGD, assert_as_alone
from helpers.quick_jobs import AdamDigits, ScheduledDigits, TinyGPT, digits
from helpers.toys import Tokens
from helpers.training import losses
from helpers.training import train as train_case


@pytest.mark.fast
def test_six_layouts_have_the_losses_of_one_worker(gang):
    layouts = ("ddp-2", "fsdp-2", "model_parallel-2", "1F1B-2", "GPipe-2x2", "parameter_server-2+2")
    assert_as_alone(gang, Case(job=digits()), *layouts)


@pytest.mark.parametrize(
    ("job", "rtol", "grad_accumulation"),
    [
        *((digits(), SGD, number) for number in (1, 2, 3)),
        (AdamDigits(hidden=24), ADAMW, 2),
        (TinyGPT(), ADAMW, 2),
        (Tokens(), SGD, 2),
    ],
    ids=["digits-sgd-1", "digits-sgd-2", "digits-sgd-3", "digits-adamw", "gpt", "tokens"],
)
def test_any_number_of_workers(gang, job, rtol, grad_accumulation):
    case = Case(job=job, train=having(global_batch_size=24, grad_accumulation=grad_accumulation))
    assert_equal_losses(gang, case, (2, 3, 4), rtol=rtol)


@pytest.mark.parametrize(("global_batch_size", "world_size", "grad_accumulation"), [(65, 2, 1), (67, 4, 3)])
def test_uneven_shares(gang, global_batch_size, world_size, grad_accumulation):
    train = having(global_batch_size=global_batch_size, grad_accumulation=grad_accumulation)
    ranks = assert_equal_losses(gang, Case(job=digits(), train=train), (world_size,), rtol=SGD)
    assert len({r.weights[0] for r in ranks}) == 2, "the shares should differ"


def test_ranks_with_different_numbers_of_valid_tokens(gang):
    ranks = assert_equal_losses(gang, Case(job=Tokens(), train=having(global_batch_size=9)), (4,), rtol=SGD)
    assert all(len(set(at_step)) > 1 for at_step in zip(*(r.weights for r in ranks), strict=True))


def test_a_rank_without_any_valid_token(gang):
    case = Case(job=Tokens(empty=6, lr=0.5), train=having(global_batch_size=8))
    ranks = assert_equal_losses(gang, case, (2, 4), rtol=SGD)
    assert any(weight == 0 for r in ranks for weight in r.weights)
    assert any(weight > 0 for r in ranks for weight in r.weights)


def test_the_norm_that_is_clipped_is_the_whole_gradients(gang):
    case = Case(job=digits(), train=having(clip_norm=0.2, global_batch_size=30))
    ranks = assert_equal_losses(gang, case, (2, 3, 4), rtol=SGD)
    (free,) = gang.run(train_case, replace(case, train=having(global_batch_size=30)), world_size=1)
    assert any(norm is not None and norm > 0.2 for norm in ranks[0].norms), "nothing was clipped"
    assert (free.model["head.weight"] - ranks[0].model["head.weight"]).abs().max() > 1e-3


def test_the_schedule_of_the_learning_rate(gang):
    ranks = assert_equal_losses(gang, Case(job=ScheduledDigits(hidden=24)), (2, 3), rtol=SGD)
    (constant,) = gang.run(train_case, Case(job=digits()), world_size=1)
    assert (constant.model["head.weight"] - ranks[0].model["head.weight"]).abs().max() > 1e-3


def test_bf16_autocast_stays_close_and_keeps_fp32_parameters(gang):
    case = Case(job=TinyGPT())
    (exact,) = gang.run(train_case, case, world_size=1)
    half = replace(case, train=having(precision="bf16"))
    for world_size in (1, 2):
        ranks = gang.run(train_case, half, world_size=world_size)
        assert not torch.equal(losses(ranks), losses([exact])), "nothing was computed in bf16"
        torch.testing.assert_close(losses(ranks), losses([exact]), rtol=0.02, atol=0)
        assert {t.dtype for t in ranks[0].model.values()} == {torch.float32}

"""Parts of samples: their rows, and attention between all of them."""

import contextlib

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from helpers.files.golden import Golden
from orchestrator.model.context.tokens import ContextPart, NotDivisible, in_order, row_axis, rows_of
from orchestrator.model.peers import Peers, in_lockstep
from orchestrator.strategies.measure.flop_counter import FlopCounter

TOKENS = 24


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("axis", [0, 1])
def test_the_rows_of_all_ranks_are_those_of_the_sample(count: int, axis: int) -> None:
    whole = torch.arange(2 * TOKENS).reshape((TOKENS, 2) if axis == 0 else (2, TOKENS))
    parts = [rows_of(whole, axis, index=index, count=count) for index in range(count)]
    assert torch.equal(in_order(parts, axis), whole)
    sums = {int(rows_of(torch.arange(TOKENS), 0, index=index, count=count).sum()) for index in range(count)}
    assert len(sums) == 1, "under a causal mask, ranks have unequal work"


@pytest.mark.parametrize(
    ("long", "short", "axis"),
    [
        ((2, 16, 16), (2, 8, 16), 1),
        ((16,), (8,), 0),
        ((2, 1, 16, 16), (2, 1, 8, 8), 2),
        ((2, 1, 16), (2, 1, 8), None),
        ((2, 1, 1, 16), (2, 1, 1, 8), None),
        ((4, 16), (4, 16), None),
    ],
)
def test_the_axis_of_rows(long: tuple[int, ...], short: tuple[int, ...], axis: int | None) -> None:
    assert row_axis(long, short) == axis


def test_more_rows_for_each_token_are_refused(golden: Golden) -> None:
    with golden.raises(NotDivisible):
        row_axis((16, 2, 16), (8, 2, 8))


@pytest.mark.parametrize("masked", ["causal", "window", "no"])
@pytest.mark.parametrize("counted", [False, True])
def test_attention_of_parts_is_that_of_whole_samples(masked: str, counted: bool) -> None:
    torch.manual_seed(0)
    distance = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)
    mask = (distance >= 0) & (distance < 5) if masked == "window" else None
    whole = [torch.randn(2, heads, TOKENS, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    weights = torch.randn(2, 4, TOKENS, 8, dtype=torch.float64)
    expected = F.scaled_dot_product_attention(*whole, mask, is_causal=masked == "causal", enable_gqa=True)
    wanted = torch.autograd.grad((expected * weights).sum(), whole)

    def of_rank(index: int, peers: Peers) -> list[Tensor]:
        part = ContextPart(index=index, count=2, peers=peers, length=TOKENS)
        own = [tensor.requires_grad_() for tensor in part.rows([t.detach() for t in whole], (2, 2, 2))]
        rows = None if mask is None else part.rows(mask, (0,))
        with FlopCounter() if counted else contextlib.nullcontext():  # in which torch refuses some masks
            output = part.attention(*own, rows, is_causal=masked == "causal", enable_gqa=True)
        return [output.detach(), *torch.autograd.grad((output * part.rows(weights, (2,))).sum(), own)]

    for index, rank in enumerate(in_lockstep(2, of_rank)):
        for found, of_whole in zip(rank, (expected, *wanted), strict=True):
            torch.testing.assert_close(found, rows_of(of_whole.detach(), 2, index=index, count=2))

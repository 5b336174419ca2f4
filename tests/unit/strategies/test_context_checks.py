"""What the plan says of samples that are divided by tokens, and why a job is refused."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from helpers.conformance.token_parts import planned
from helpers.jobs.quick_jobs import TinyGPT
from helpers.jobs.toys import Rows, Toy
from orchestrator.job import Job, Split
from orchestrator.model.context.division import Division, divide_tokens
from orchestrator.model.context.tokens import ContextPart, NotDivisible
from orchestrator.model.peers import Peers, in_lockstep


def of_rank(index: int, peers: Peers) -> dict[str, Tensor]:
    """What a rank of two draws in a block for its four tokens of each sample, and afterwards."""
    torch.manual_seed(0)
    part = ContextPart(index=index, count=2, peers=peers, length=8)

    class Draws(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {
                "rows": F.dropout(x, 0.5, self.training),
                "attention": F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
                "samples": F.dropout(torch.ones(2, 8), 0.5, self.training),
                "afterwards": torch.rand(8),
            }

    model = nn.Sequential(Draws())
    divide_tokens(model, Division(blocks={"0": (1,)}, outputs=(1,)), part)
    return model(torch.ones(2, 8, 8))


def test_ranks_drop_other_entries_of_what_is_divided_alone() -> None:
    one, other = in_lockstep(2, of_rank)
    assert {name: torch.equal(one[name], other[name]) for name in one} == {
        "rows": False,
        "attention": False,
        "samples": True,
        "afterwards": True,
    }


class Mixed(nn.Module):
    """A block in which tokens see each other in another way, before attention."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind
        self.inner = {
            "convolution": lambda: nn.Conv1d(8, 8, 3, padding=1),
            "recurrence": lambda: nn.GRU(8, 8, batch_first=True),
            "statistics": lambda: nn.BatchNorm1d(8),
        }.get(kind, lambda: nn.Linear(8, 8))()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        if self.kind in ("convolution", "statistics"):
            return x + self.inner(x.mT).mT
        if self.kind == "recurrence":
            return x + self.inner(x)[0]
        y = self.inner(x)
        if self.kind == "eager":
            return x + (y @ y.mT).masked_fill(~mask, -torch.inf).softmax(-1) @ y
        if self.kind == "own mask":
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        elif self.kind == "last token":
            return x + y[:, -1:]
        return x + F.dropout(F.scaled_dot_product_attention(y, y, y, mask), 0.1, self.training)


class Stack(nn.Module):
    """Blocks that are called with a mask of the last four tokens."""

    def __init__(self, kind: str):
        super().__init__()
        self.token = nn.Embedding(32, 8)
        self.blocks = nn.ModuleList(Mixed(kind) for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x, places = self.token(tokens), torch.arange(tokens.shape[1])
        distance = places[:, None] - places
        for block in self.blocks:
            x = block(x, (distance >= 0) & (distance < 4))
        return F.linear(x, self.token.weight)


@dataclass(frozen=True, kw_only=True)
class OfKind(Job):
    """A language model of such blocks, whose loss leaves out labels, and counts them or not."""

    kind: str = "window"
    counts: bool = False
    shifts: bool = False
    by_sample: bool = False
    length: int = 24

    def model(self) -> nn.Module:
        return Stack(self.kind)

    def dataset(self, split: Split) -> Rows:
        rows = [(torch.arange(self.length + 1) * (3 + i) + i) % 31 for i in range(32)]
        return Rows([(row[:-1], row[1:]) for row in rows])

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        if self.shifts:
            output, target = output[:, :-1], target[:, 1:]
        if self.by_sample:  # the mean of the means of samples
            losses = F.cross_entropy(output.mT, target, reduction="none").sum(dim=1)
            return (losses / (target >= 0).sum(dim=1)).mean()
        if self.counts:  # a mean over all tokens, also those without a label
            return F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum") / target.numel()
        return F.cross_entropy(output.flatten(0, 1), target.flatten())

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("fields", [{"variant": "llama"}, {"variant": "llama", "end_token": 32}, {}], ids=str)
def test_a_transformer_is_divided(fields: Mapping[str, Any], count: int) -> None:
    assert planned(TinyGPT(layers=3, context=24, **fields), count).by_rows


def test_masks_of_whole_samples_are_cut() -> None:
    plan = planned(OfKind())
    assert plan.division.blocks["blocks.1"] == (1, 0)
    assert plan.by_rows


@pytest.mark.parametrize("fields", [{"shifts": True}, {"counts": True}, {"by_sample": True}], ids=str)
def test_a_loss_that_is_no_mean_over_parts_gets_all_tokens(fields: Mapping[str, Any]) -> None:
    assert not planned(OfKind(**fields)).by_rows


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "error"),
    [
        (OfKind(kind="convolution"), "blocks.0.inner computes something else of some tokens than of all"),
        (OfKind(kind="recurrence"), "blocks.0.inner computes something else of some tokens than of all"),
        (OfKind(kind="last token"), "blocks.0 computes something else of some tokens than of all"),
        (OfKind(kind="eager"), "blocks.0 raises RuntimeError for some tokens"),
        (OfKind(kind="own mask"), "blocks.0 makes a mask of the tokens that it is called with; make it before the"),
        (
            OfKind(length=18),
            "samples of 18 tokens, no multiple of 4, twice the number of parts; make or pad them to 20",
        ),
        (OfKind(kind="statistics"), "blocks.0.inner computes something else of some tokens than of all"),
        (Toy(), "the model has no nn.ModuleList or nn.Sequential with several blocks of one class"),
    ],
    ids=[
        *("convolution", "recurrence", "last token", "eager", "own mask", "length", "statistics", "no blocks"),
    ],
)
def test_what_tokens_do_otherwise_is_refused_with_the_module(job: Job, error: str) -> None:
    with pytest.raises(NotDivisible, match=f"^{re.escape(error)}"):
        planned(job)

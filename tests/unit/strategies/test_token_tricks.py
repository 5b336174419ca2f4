"""Models whose tokens depend on each other or on their number: trained as whole ones, or refused."""

from dataclasses import dataclass

import pytest
import torch

from helpers.conformance.token_parts import difference, planned
from helpers.jobs.toys import Rows
from helpers.models.token_tricks import TRICKS, Tricky
from orchestrator.job import Split
from orchestrator.model.context.tokens import NotDivisible

IN_CI = (
    *("written out", "windows of one block", "other in evaluations", "counts in a buffer", "mean kept as a number"),
    *("loss in the backward pass", "large values see each other", "torchs own", "noted by hooks"),
    *("hidden states in evaluations", "shape of the words", "tokens count", "limited mean"),
)
ROWS = [pytest.param(name, marks=pytest.mark.slow if name in IN_CI else pytest.mark.campaign) for name in TRICKS]


@pytest.mark.parametrize("name", ROWS)
def test_a_trick_trains_the_same_model_or_is_refused(name: str) -> None:
    job = Tricky(trick=name)
    if TRICKS[name].expected == "refused":
        with pytest.raises(NotDivisible):
            planned(job)
        return
    plan = planned(job)
    assert difference(job, plan) < 1e-5
    assert difference(Tricky(trick=name, adam=True), plan, clip=0.5) < 1e-3


@dataclass(frozen=True, kw_only=True)
class Rare(Tricky):
    """Has the label that counts in another way in the last sample alone, which no search reads."""

    label: int = 0

    def dataset(self, split: Split) -> Rows:
        *items, (words, target) = super().dataset(split).items
        items = [(words, torch.where((target >= 0) & (target < 4), 9, target)) for words, target in items]
        return Rows([*items, (words, target.fill_(self.label))])


@pytest.mark.parametrize("label", [0, 3])
def test_a_label_that_no_sample_of_the_search_has_is_tried(label: int) -> None:
    job = Rare(trick="small labels are left out", label=label)
    plan = planned(job)
    assert not plan.by_rows
    assert difference(job, plan, rows=8) < 1e-5

"""Models whose tokens depend on each other or on their number: trained as whole ones, or refused."""

import pytest

from helpers.conformance.token_parts import difference, planned
from helpers.models.token_tricks import TRICKS, Tricky
from orchestrator.model.context_part import NotDivisible

IN_CI = (
    "written out",
    "windows of one block",
    "other in evaluations",
    "counts in a buffer",
    "mean kept as a number",
    "loss in the backward pass",
    "large values see each other",
    "torchs own",
    "noted by hooks",
    "hidden states in evaluations",
    "shape of the words",
    "tokens count",
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

"""A model with an unusual part trains as the whole under ``strategy.tensor``, or is refused in a sentence."""

import pytest

from helpers.models.in_turn import trained
from helpers.models.rarer_tricks import tricks
from helpers.models.tricks import Tricky

NEAR = 1e-7
DIVIDED = (
    *("cap at logits", "numbers per head", "multi-head attention", "column of tuples", "second derivative"),
    *("shared keys", "auxiliary loss outside", "table with another", "blocks of tuples", "old weight norm of the head"),
    "two heads and a residual that is given",
)
WHOLE = {
    "penalty": "in the whole model, it would change the loss",
    "max norm": "in the whole model, it would change the loss",
    "hook of activation": "in the whole model, it would change the loss",
    "fused evaluation": "would change its output",
    "limit of wide weights": "would change its output",
    "softmax at hidden": "would change its output",
    "gradient normed, hidden": "would change the gradient",
    "gate in reverse": "would change its output",
    "old weight norm": "mlp.up: its weight is computed, as by weight_norm",
}
IN_TOKENS = {"states in evaluation": "raises RuntimeError", "counting at input": "would change at_input.seen"}


@pytest.mark.slow
@pytest.mark.parametrize("trick", DIVIDED)
def test_models_that_are_divided_train_as_the_whole(trick: str) -> None:
    found = trained(Tricky(trick=trick))
    assert found.plan is not None, found.refusal
    assert found.plan.reasons == []
    assert found.apart < NEAR


@pytest.mark.slow
@pytest.mark.parametrize(("trick", "reason"), WHOLE.items())
def test_layers_that_would_make_another_model_stay_whole(trick: str, reason: str) -> None:
    found = trained(Tricky(trick=trick))
    assert reason in (found.refusal if found.plan is None else "; ".join(found.plan.reasons))
    assert found.apart < NEAR


@pytest.mark.slow
@pytest.mark.parametrize(("trick", "reason"), IN_TOKENS.items())
def test_tokens_are_not_divided_where_others_need_them(trick: str, reason: str) -> None:
    assert reason in trained(Tricky(trick=trick), sequence=True).refusal


@pytest.mark.slow
def test_one_block_that_is_called_otherwise_keeps_its_layers() -> None:
    found = trained(Tricky(trick="layer called outside"))
    assert found.apart < NEAR
    assert [(kind.names, len(kind.proof.parts.pairs)) for kind in found.plan.kinds] == [
        (("blocks.0",), 1),
        (("blocks.1", "blocks.2"), 2),
    ]


@pytest.mark.campaign
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("trick", tricks())
def test_no_trick_trains_another_model(trick: str, sequence: bool) -> None:
    found = trained(Tricky(trick=trick), sequence=sequence)
    assert found.apart < NEAR, found.refusal

"""Models with a trick each where layers, tokens or samples are divided: as on one worker, or refused.

``benchmarks/models.py`` makes the same comparison with all of them, and writes its counts to docs/models.md.
"""

from dataclasses import dataclass, replace
from typing import Any

import pytest

from helpers.conformance.cases import Case
from helpers.jobs.toys import Rows
from helpers.models.tricks import WORDS, Tricky
from helpers.models.zoo_cells import DIVIDED, EVERY, TRAIN, Outcome, cell, trained
from helpers.ranks.gang import Gang
from helpers.records.runs import in_campaign
from orchestrator.job import Split

CELLS: list[tuple[str, str, Outcome, str]] = [
    ("features/hook of column", "ddp, sequence", "refused", "strategy.sequence=true: with a part of the tokens"),
    (
        "features/hook of row",
        "fsdp, context",
        "refused",
        "blocks.0.mlp.down has a hook, which sees a worker's own tokens",
    ),
    ("tokens/windows", "fsdp, context", "equal", ""),
]
"""A model, the layout, the outcome, and words that are said."""
RARER: list[tuple[str, str, Outcome, str]] = [
    ("features/softmax at hidden", "ddp, tensor", "equal", ""),
    ("tokens/torchs own", "ddp, tensor", "equal", ""),
    ("features/cap at logits", "fsdp, tensor", "equal", ""),
    ("tokens/squeeze and excite", "fsdp, context, tensor", "equal", ""),
    ("features/scalar at queries", "pipeline, tensor", "equal", ""),
    ("tokens/token shift", "pipeline, context", "equal", ""),
]


@pytest.mark.parametrize(("name", "layout", "outcome", "words"), [*CELLS, *in_campaign(*RARER)])
def test_a_trick_trains_the_same_model_or_is_refused(
    gang: Gang, name: str, layout: str, outcome: Outcome, words: str
) -> None:
    found = cell(gang, name, layout)
    assert (found.outcome, words in found.detail) == (outcome, True), found.detail


@dataclass(frozen=True, kw_only=True)
class OneMore(Tricky):
    """A training set with a token that the vocabulary lacks, in none of the samples that are looked at before.

    ``of`` is the number of the tensor that has it: 0 for inputs, 1 for labels.
    """

    word: int = WORDS
    of: int = 0

    def dataset(self, split: Split) -> Any:
        items = super().dataset(split).items
        if split == "train":
            items[5][self.of][3] = self.word
        return Rows(items)


@pytest.mark.parametrize(("of", "word"), [(0, WORDS), (1, WORDS), *in_campaign((0, -1), (1, -1))])
@pytest.mark.parametrize(
    "layout",
    ["single", "ddp, tensor", *in_campaign("ddp", "fsdp", "pipeline", *(of for of in DIVIDED if of != "ddp, tensor"))],
)
def test_a_token_that_the_vocabulary_lacks_is_an_error(gang: Gang, layout: str, of: int, word: int) -> None:
    options, world_size = EVERY[layout]
    case = Case(job=OneMore(of=of, word=word), train=replace(TRAIN, check="never"), options=options)
    case = replace(case, alone=options if world_size == 1 else None)
    answers = gang.ask(trained, case, world_size=world_size)
    assert any((answer.error or "").startswith("IndexError: ") for answer in answers), answers

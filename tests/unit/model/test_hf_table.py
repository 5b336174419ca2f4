"""Types of models of transformers: equal to one worker wherever batches are divided and models cut, or known to differ.

Each row needs a second, and nothing but the installed package: replicas and micro-batches are compared as rank 0 does
before training, and so are stages. ``tests/distributed/models/test_model_zoo.py`` trains some models for real.
"""

import pytest
import torch

pytest.importorskip("transformers")

from helpers.models.catalogue import job_of
from helpers.models.hf_checks import has_batch_norm, in_stages, on_parts
from helpers.models.hf_table import TYPES, Kind
from helpers.models.in_turn import trained

pytestmark = pytest.mark.campaign

ROWS = [(kind, name) for kind, names in TYPES.items() for name in names.split()]
COMPARES_SAMPLES = {("text", "ibert"): "embeddings_act1.x_min"}
"""Rows that replicas and micro-batches change, and a word of the warning: I-BERT tracks ranges of activations."""
HAS_BATCH_NORM = {
    ("image", name)
    for name in (
        *("efficientnet", "hgnet_v2", "mobilenet_v1", "mobilenet_v2", "mobilevit", "regnet", "resnet", "swiftformer"),
        "textnet",
    )
}
"""Rows that differ by nature, which the plan notes."""
NEEDS_VALUES = "its forward() fails with tensors that have a shape and no values"
NOT_CUT: dict[tuple[str, str], str] = {
    **{("text", name): NEEDS_VALUES for name in ("bart", "bigbird_pegasus", "mbart", "mt5", "mvp", "plbart", "umt5")},
    ("text", "big_bird"): "the pieces fail (ValueError: Query sided",
    ("language", "big_bird"): "the pieces fail (ValueError: Query sided",
}
"""Rows that are refused in stages, and words of the reason.

The first ones look for the token that ends a sequence; BigBird chooses its attention in its first pass.
"""


NOT_DIVIDED = frozenset(
    (
        *("axk2", "bailing_hybrid", "bart", "big_bird", "bigbird_pegasus", "bitnet"),
        *("blenderbot", "blenderbot-small", "deepseek_v32", "deepseek_v4", "diffllama", "doge"),
        *("falcon_mamba", "flex_olmo", "glm_moe_dsa", "hy_v4", "inkling2_text", "inkling_text"),
    )
)
"""Language models that ``strategy.tensor`` refuses."""


@pytest.mark.parametrize(("kind", "name"), ROWS)
def test_replicas_and_micro_batches(kind: Kind, name: str) -> None:
    said = on_parts(kind, name)
    assert COMPARES_SAMPLES.get((kind, name), "") in said
    assert bool(said) == ((kind, name) in COMPARES_SAMPLES), said
    assert has_batch_norm(kind, name) == ((kind, name) in HAS_BATCH_NORM)


@pytest.mark.parametrize(("kind", "name"), ROWS)
def test_stages(kind: Kind, name: str) -> None:
    said = in_stages(kind, name)
    assert NOT_CUT.get((kind, name), "") in said
    assert bool(said) == ((kind, name) in NOT_CUT), said


@pytest.mark.parametrize(("kind", "name"), [row for row in ROWS if row[0] == "language"])
def test_layers_divided_over_workers(kind: Kind, name: str) -> None:
    found = trained(job_of(f"{kind}/{name}"), dtype=torch.float32)
    assert found.apart < 1e-4, found.refusal
    assert (found.plan is None) == (name in NOT_DIVIDED), found.refusal

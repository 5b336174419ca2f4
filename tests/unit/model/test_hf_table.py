"""Types of models of transformers: equal to one worker wherever batches are divided and models cut, or known to differ.

Each row needs a second, and nothing but the installed package: replicas and micro-batches are compared as rank 0 does
before training, and so are stages. ``tests/distributed/models/test_model_zoo.py`` trains some models for real.
"""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from helpers.models.hf_table import Kind, has_batch_norm, in_stages, on_parts

pytestmark = pytest.mark.campaign

TYPES: dict[Kind, str] = {
    "text": """
        albert arcee axk2 bart bert big_bird bigbird_pegasus biogpt bloom camembert canine convbert ctrl
        data2vec-text deberta deberta-v2 diffllama distilbert doge electra ernie esm esmc eurobert exaone4
        flaubert fnet gemma gemma2 gemma3_text glm glm4 gpt-sw3 gpt2 gpt_bigcode gpt_neox gpt_oss gte helium
        hunyuan_v1_dense hunyuan_v1_moe ibert jamba jetmoe jina_embeddings_v3 layoutlm llama longformer markuplm
        mbart megatron-bert minicpm3 minimax ministral ministral3 mistral mixtral mobilebert modernbert
        modernbert-decoder mpnet mpt mra mt5 mvp nemotron nomic_bert nystromformer olmo olmo2 olmo3 openai-gpt
        opt persimmon phi phi3 phimoe plbart qwen2 qwen2_moe qwen3 qwen3_5_text qwen3_moe qwen3_next rembert
        roberta roberta-prelayernorm roc_bert roformer seed_oss smollm3 squeezebert stablelm starcoder2 tapas
        ultrabert umt5 xlm xlm-roberta xlm-roberta-xl yoso
    """,
    "image": """
        beit bit convnext convnextv2 data2vec-vision dinov2 dinov2_with_registers efficientnet focalnet hgnet_v2
        ijepa mobilenet_v1 mobilenet_v2 mobilevit poolformer regnet resnet segformer swiftformer swin swinv2
        textnet vit vit_msn
    """,
    "language": """
        afmoe apertus arcee aria_text axk2 bailing_hybrid bart beam bert bert-generation big_bird
        bigbird_pegasus biogpt bitnet blenderbot blenderbot-small bloom camembert cohere cohere2 cohere2_moe
        cpmant ctrl cwm data2vec-text deepseek_v32 deepseek_v4 diffllama doge electra ernie ernie4_5
        ernie4_5_moe exaone4 exaone_moe falcon_mamba flex_olmo flint glm4_moe glm4_moe_lite glm_moe_dsa
        gpt_neox_japanese granite granite_swa granitemoe granitemoe_swa granitemoeshared hrm_text hy_v3 hy_v4
        hyperclovax inkling2_text inkling_text internlm3 iquestcoder jais2
    """,
}
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
NEEDS_ITS_BATCH = "its forward() fails with random values in place of a batch"
NOT_CUT: dict[tuple[str, str], str] = {
    **{
        ("text", name): NEEDS_ITS_BATCH for name in ("bart", "bigbird_pegasus", "mbart", "mt5", "mvp", "plbart", "umt5")
    },
    ("text", "big_bird"): "the pieces fail (ValueError: Query sided",
    ("language", "big_bird"): "the pieces fail (ValueError: Query sided",
}
"""Rows that are refused in stages, and words of the reason.

The first ones look for the token that ends a sequence; BigBird chooses its attention in its first pass.
"""


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

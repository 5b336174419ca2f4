"""Types of models of transformers: equal to one worker wherever batches are divided and models cut, or known to differ.

Each row needs a second, and nothing but the installed package: replicas and micro-batches are compared as rank 0 does
before training, and so are stages. ``tests/distributed/test_model_zoo.py`` trains some models for real.
"""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from helpers.hf_table import Kind, has_batch_norm, in_stages, on_parts

pytestmark = pytest.mark.campaign

TYPES: dict[Kind, str] = {
    "text": """
        albert arcee bert biogpt bloom camembert canine convbert ctrl data2vec-text deberta deberta-v2 diffllama
        distilbert doge electra ernie esm esmc eurobert exaone4 flaubert fnet gemma gemma2 gemma3_text glm glm4
        gpt-sw3 gpt2 gpt_bigcode gpt_neox gpt_oss gte helium hunyuan_v1_dense hunyuan_v1_moe ibert jamba jetmoe
        jina_embeddings_v3 layoutlm llama longformer megatron-bert minicpm3 minimax ministral ministral3 mistral
        mixtral mobilebert modernbert modernbert-decoder mpnet mpt mra nemotron nomic_bert nystromformer olmo olmo2
        olmo3 openai-gpt opt persimmon phi phi3 phimoe qwen2 qwen3 qwen3_5_text qwen3_moe rembert roberta
        roberta-prelayernorm roformer seed_oss smollm3 squeezebert stablelm starcoder2 tapas ultrabert xlm xlm-roberta
        xlm-roberta-xl yoso
    """,
    "image": """
        beit data2vec-vision dinov2 dinov2_with_registers focalnet ijepa mobilenet_v2 vit vit_msn
    """,
    "language": """
        afmoe apertus arcee aria_text bailing_hybrid bart beam bert bert-generation bigbird_pegasus biogpt bitnet
        blenderbot blenderbot-small bloom camembert cohere cohere2 cohere2_moe ctrl cwm data2vec-text diffllama doge
        electra ernie ernie4_5 ernie4_5_moe exaone4 exaone_moe
    """,
}
ROWS = [(kind, name) for kind, names in TYPES.items() for name in names.split()]
COMPARES_SAMPLES = {("text", "ibert"): "embeddings_act1.x_min"}
"""Rows that replicas and micro-batches change, and a word of the warning: I-BERT tracks ranges of activations."""
HAS_BATCH_NORM = {("image", "mobilenet_v2")}
"""Rows that differ by nature, which the plan notes."""
NOT_CUT: dict[tuple[str, str], str] = {}
"""Rows that are refused in stages, and a word of the reason."""


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

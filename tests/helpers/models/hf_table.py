"""Models of transformers by their type, tiny and with random weights.

A configuration gets a small value for every size that it has. So a type is a row of the table without code of its own.
"""

import functools
import re
import warnings
from typing import Any, Literal

import torch
from torch import Tensor, nn

from helpers.models.tasks import (
    CLASSES,
    LENGTH,
    VOCABULARY,
    Classes,
    Exhibit,
    NextToken,
    Task,
    TextClasses,
    Translation,
)

IMAGE = 32
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "d_model": 16,
    "embedding_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
    "head_dim": 8,
    "max_position_embeddings": 2 * LENGTH,
    "num_labels": CLASSES,
    "num_local_experts": 2,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "use_cache": False,
    "image_size": IMAGE,
    "patch_size": 8,
    "embed_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
OF_TYPE: dict[str, dict[str, Any]] = {
    "bit": {"embedding_size": 32, "hidden_sizes": [32, 32], "depths": [1, 1], "num_groups": 4},
    "falcon": {"head_dim": None, "multi_query": False},  # which it computes
    "falcon_mamba": {"conv_kernel": 4},
    "convnext": {"num_hidden_layers": 4, "hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1], "patch_size": 4},
    "convnextv2": {"num_hidden_layers": 4, "hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1], "patch_size": 4},
    "efficientnet": {"width_coefficient": 0.1, "depth_coefficient": 0.1, "hidden_dim": 128},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "window_size": 4},
    "marian": {"decoder_start_token_id": 0},
    "segformer": {"num_attention_heads": [1, 2, 2, 2], "hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1]},
    "swin": {"num_attention_heads": [2, 2], "depths": [1, 1], "window_size": 2, "patch_size": 4},
    "swinv2": {"num_attention_heads": [2, 2], "depths": [1, 1], "window_size": 2, "patch_size": 4},
    "t5": {"decoder_start_token_id": 0},
}
"""Sizes that a type has as lists, or under names of its own."""


SOUND: dict[str, Any] = {
    "conv_dim": (8, 8),
    "conv_stride": (4, 4),
    "conv_kernel": (8, 8),
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 8,
}
_RANDOM = re.compile("drop|mask_time_prob|mask_feature_prob|jitter")


def _ended(item: dict[str, Tensor]) -> dict[str, Tensor]:
    item["input_ids"][item["attention_mask"].sum() - 1] = SIZES["eos_token_id"]
    return item


class EndedTexts(TextClasses):
    """The last valid token ends the sequence, and some models classify it."""

    def item(self, number: int, random: torch.Generator) -> dict[str, Tensor]:
        return _ended(super().item(number, random))


Kind = Literal["text", "image", "language", "translation", "sound"]
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
        ernie4_5_moe exaone4 exaone_moe falcon falcon_mamba flex_olmo flint glm4_moe glm4_moe_lite glm_moe_dsa
        gpt_neo gpt_neox_japanese granite granite_swa granitemoe granitemoe_swa granitemoeshared hrm_text hy_v3 hy_v4
        hyperclovax inkling2_text inkling_text internlm3 iquestcoder jais2 mpt
    """,
    "translation": """
        bart bigbird_pegasus blenderbot blenderbot-small m2m_100 marian mbart mt5 mvp nllb-moe pegasus
        pegasus_x plbart prophetnet switch_transformers t5 umt5
    """,
    "sound": """
        data2vec-audio hubert sew unispeech unispeech-sat wav2vec2 wav2vec2-conformer wavlm
    """,
}
"""Types by what is trained: classes of texts and images, the next token, a translation, classes of sounds."""


class EndedTranslation(Translation):
    """The last valid token ends the sequence."""

    def item(self, number: int, random: torch.Generator) -> dict[str, Tensor]:
        return _ended(super().item(number, random))


UNSHIFTED = ("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "cpmant")
"""Language models whose own loss compares a token with the label at its own place."""

TASKS: dict[Kind, Task] = {
    "text": EndedTexts(),
    "image": Classes("pixel_values", (3, IMAGE, IMAGE)),
    "language": NextToken(),
    "translation": EndedTranslation(),
    "sound": Classes("input_values", (200,)),
}
LOADERS: dict[Kind, str] = {
    "text": "AutoModelForSequenceClassification",
    "image": "AutoModelForImageClassification",
    "language": "AutoModelForCausalLM",
    "translation": "AutoModelForSeq2SeqLM",
    "sound": "AutoModelForAudioClassification",
}


def build(kind: Kind, model_type: str) -> nn.Module:
    """The model of this type for a task, without dropout and other random numbers."""
    import transformers as hf

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        default = hf.AutoConfig.for_model(model_type)
        sizes = {name: value for name, value in {**SIZES, **SOUND}.items() if hasattr(default, name)}
        off = {name: 0.0 for name, value in default.to_dict().items() if _RANDOM.search(name) and type(value) is float}
        given = {**off, **sizes, **OF_TYPE.get(model_type, {})}
        config = hf.AutoConfig.for_model(model_type, **{n: value for n, value in given.items() if value is not None})
        model: nn.Module = getattr(hf, LOADERS[kind]).from_config(config)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        return model


def _exhibit(kind: Kind, model_type: str) -> Exhibit:
    return Exhibit(
        title=model_type,
        package="transformers",
        build=functools.partial(build, kind, model_type),
        task=Translation() if kind == "language" and model_type in UNSHIFTED else TASKS[kind],
        not_in_stages=() if kind == "translation" else ("labels",),
    )


TABLE = {f"{kind}/{name}": _exhibit(kind, name) for kind, names in TYPES.items() for name in names.split()}

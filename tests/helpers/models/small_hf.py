"""A small Llama of ``transformers`` and a tokenizer of bytes. A test without these packages is skipped."""

from typing import Any

import pytest
import torch

CHAT = "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
COMMON: dict[str, Any] = {"vocab_size": 300, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}
BERT: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
LORA: dict[str, Any] = {"peft": "lora", "peft_options": {"r": 4, "target_modules": ["q_proj", "v_proj"]}}
"""Fields of ``job=hf``."""


def llama() -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(**BERT, num_key_value_heads=1, max_position_embeddings=64, **COMMON)
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


def byte_tokenizer() -> Any:
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    bytes_of = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab={"<end>": 0, "<pad>": 1, "<mask>": 2}
            | {c: i + 3 for i, c in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))},
            merges=[],
        )
    )
    bytes_of.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_of.decoder = tokenizers.decoders.ByteLevel()
    named = {"eos_token": "<end>", "pad_token": "<pad>", "mask_token": "<mask>"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=bytes_of, **named)
    tokenizer.chat_template = CHAT
    return tokenizer

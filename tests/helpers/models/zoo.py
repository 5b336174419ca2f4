"""Models of transformers, diffusers and peft with random weights and tiny sizes, each configured by hand."""

from collections.abc import Callable

from torch import nn

from helpers.models.tasks import (
    CLASSES,
    LENGTH,
    VOCABULARY,
    Classes,
    Exhibit,
    NextToken,
    Pairs,
    Reconstruction,
    Speech,
    Task,
    TextClasses,
    Translation,
)

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
"""Stages and replicas draw other random numbers than one worker does."""
SPECIAL_TOKENS = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1}
ENCODER_DECODER = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
    "dropout": 0.0,
    "decoder_start_token_id": 0,
    "use_cache": False,
    **SPECIAL_TOKENS,
}
BLOCKS = {"block_out_channels": (8, 16), "norm_num_groups": 4, "in_channels": 1, "out_channels": 1}


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(
        BertConfig(vocab_size=VOCABULARY, num_labels=CLASSES, max_position_embeddings=16, **SMALL, **NO_DROPOUT)
    )


def distilbert() -> nn.Module:
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    sizes = {"dim": 16, "hidden_dim": 16, "n_layers": 2, "n_heads": 2, "max_position_embeddings": 16}
    dropout = {"dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0}
    return DistilBertForSequenceClassification(
        DistilBertConfig(vocab_size=VOCABULARY, num_labels=CLASSES, **sizes, **dropout)
    )


def deberta() -> nn.Module:
    from transformers import DebertaV2Config, DebertaV2ForSequenceClassification

    return DebertaV2ForSequenceClassification(
        DebertaV2Config(
            vocab_size=VOCABULARY,
            num_labels=CLASSES,
            max_position_embeddings=16,
            relative_attention=True,
            pos_att_type=["p2c", "c2p"],
            pooler_dropout=0.0,
            **SMALL,
            **NO_DROPOUT,
        )
    )


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(image_size=8, patch_size=4, num_channels=1, num_labels=CLASSES, **SMALL, **NO_DROPOUT)
    )


def gpt2(use_cache: bool = False) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(use_cache=use_cache, **sizes, **SPECIAL_TOKENS, **dropout))


def llama(use_cache: bool = False) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=1, use_cache=use_cache, **SMALL))


def llama_with_cache() -> nn.Module:
    return llama(use_cache=True)


def llama_recomputed() -> nn.Module:
    """Its blocks compute their activations again in the backward pass, as transformers does it."""
    model = llama()
    model.gradient_checkpointing_enable()
    return model


def qwen() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(
        Qwen3Config(vocab_size=VOCABULARY, head_dim=8, num_key_value_heads=1, use_cache=False, **SMALL)
    )


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(vocab_size=VOCABULARY, num_key_value_heads=1, num_local_experts=2, use_cache=False, **SMALL)
    )


def mamba() -> nn.Module:
    from transformers import MambaConfig, MambaForCausalLM

    return MambaForCausalLM(
        MambaConfig(
            vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, state_size=4, use_cache=False, **SPECIAL_TOKENS
        )
    )


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(dropout_rate=0.0, decoder_start_token_id=0, use_cache=False, **sizes))


def bart() -> nn.Module:
    from transformers import BartConfig, BartForConditionalGeneration

    return BartForConditionalGeneration(
        BartConfig(max_position_embeddings=16, forced_eos_token_id=1, **ENCODER_DECODER)
    )


def whisper() -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    sizes = {"num_mel_bins": 8, "max_source_positions": LENGTH, "max_target_positions": 16}
    return WhisperForConditionalGeneration(WhisperConfig(**sizes, **ENCODER_DECODER))


def wav2vec2() -> nn.Module:
    from transformers import Wav2Vec2Config, Wav2Vec2ForSequenceClassification

    convolutions = {"conv_dim": (8, 8), "conv_stride": (4, 4), "conv_kernel": (8, 8), "num_conv_pos_embeddings": 4}
    dropout = ("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout", "final_dropout")
    return Wav2Vec2ForSequenceClassification(
        Wav2Vec2Config(
            vocab_size=VOCABULARY,
            num_labels=CLASSES,
            classifier_proj_size=8,
            num_conv_pos_embedding_groups=2,
            mask_time_prob=0.0,
            layerdrop=0.0,
            **dict.fromkeys(dropout, 0.0),
            **convolutions,
            **SMALL,
        )
    )


def clip() -> nn.Module:
    from transformers import CLIPConfig, CLIPModel

    text = {"vocab_size": VOCABULARY, "max_position_embeddings": 16, **SPECIAL_TOKENS, **SMALL}
    vision = {"image_size": 8, "patch_size": 4, "num_channels": 1, **SMALL}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8))


def lora_gpt2() -> nn.Module:
    """GPT-2, of which only adapters are trained."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(gpt2(), LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))


def lora_llama() -> nn.Module:
    """Llama, of which adapters and a copy of the last norm are trained."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"], modules_to_save=["norm"]))


def unet() -> nn.Module:
    from diffusers import UNet2DModel

    return UNet2DModel(
        sample_size=8,
        layers_per_block=1,
        attention_head_dim=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        **BLOCKS,
    )


def dit() -> nn.Module:
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=2,
        out_channels=2,
        num_layers=2,
        norm_num_groups=2,
        sample_size=4,
        patch_size=2,
        num_embeds_ada_norm=10,
    )
    for block in model.transformer_blocks:
        block.norm1.emb.class_embedder.dropout_prob = 0.0
    return model


def autoencoder() -> nn.Module:
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=2,
        sample_size=8,
        **BLOCKS,
    )


def _of(package: str, title: str, build: Callable[[], nn.Module], task: Task, split: str) -> Exhibit:
    return Exhibit(title=title, package=package, build=build, task=task, split=split)


HF, DIFFUSERS, PEFT = "transformers", "diffusers", "peft"
ZOO: dict[str, Exhibit] = {
    "bert": _of(HF, "BERT", bert, TextClasses(), "bert.encoder.layer.1"),
    "distilbert": _of(HF, "DistilBERT", distilbert, TextClasses(), "distilbert.transformer.layer.1"),
    "deberta": Exhibit(
        title="DeBERTa-v2",
        package=HF,
        build=deberta,
        task=TextClasses(),
        split="deberta.encoder.layer.1",
        not_in_stages=("labels",),  # its own loss selects the valid labels, whose number depends on values
    ),
    "vit": _of(HF, "ViT", vit, Classes("pixel_values", (1, 8, 8)), "vit.layers.1"),
    "gpt2": _of(HF, "GPT-2", gpt2, NextToken(), "transformer.h.1"),
    "llama": _of(HF, "Llama", llama, NextToken(), "model.layers.1"),
    "llama_with_cache": _of(HF, "Llama, use_cache=True", llama_with_cache, NextToken(), "model.layers.1"),
    "llama_recomputed": _of(HF, "Llama, recomputed", llama_recomputed, NextToken(), "model.layers.1"),
    "qwen": _of(HF, "Qwen3", qwen, NextToken(), "model.layers.1"),
    "mixtral": _of(HF, "Mixtral", mixtral, NextToken(), "model.layers.1"),
    "mamba": _of(HF, "Mamba", mamba, NextToken(), "backbone.layers.1"),
    "t5": _of(HF, "T5", t5, Translation(), "decoder.block.1"),
    "bart": _of(HF, "BART", bart, Translation(), "model.decoder.layers.1"),
    "whisper": _of(HF, "Whisper", whisper, Speech(), "model.decoder.layers.1"),
    "wav2vec2": _of(HF, "Wav2Vec2", wav2vec2, Classes("input_values", (200,)), "wav2vec2.encoder.layers.1"),
    "clip": _of(HF, "CLIP", clip, Pairs(), "text_model"),
    "lora_gpt2": _of(PEFT, "GPT-2 with LoRA", lora_gpt2, NextToken(), "base_model.model.transformer.h.1"),
    "lora_llama": _of(PEFT, "Llama with LoRA", lora_llama, NextToken(), "base_model.model.model.layers.1"),
    "unet": _of(DIFFUSERS, "UNet2DModel", unet, Reconstruction("sample", (1, 8, 8), ("timestep",)), "mid_block"),
    "dit": _of(
        DIFFUSERS,
        "DiTTransformer2DModel",
        dit,
        Reconstruction("hidden_states", (2, 4, 4), ("timestep", "class_labels")),
        "transformer_blocks.1",
    ),
    "autoencoder": _of(DIFFUSERS, "AutoencoderKL", autoencoder, Reconstruction("sample", (1, 8, 8)), "decoder"),
}

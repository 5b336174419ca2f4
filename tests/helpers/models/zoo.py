"""Models of transformers, diffusers and peft, with random weights and tiny sizes, and the jobs that train them.

A job passes the batch, a dict, as keyword arguments and takes the loss that the model computes, if it computes one. For
stages, :class:`Staged` wraps the same model in a module that takes the dict, and computes the loss itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from helpers.jobs.toys import Rows
from orchestrator.job import Job, Split

VOCABULARY, LENGTH, CLASSES, IGNORED = 32, 8, 4, -100
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


# What the models are trained on ------------------------------------------------------------------


class Task:
    """Samples, and the loss of what the model returns for them. ``result`` names the outputs that the loss needs."""

    result: tuple[str, ...] = ("logits",)
    has_own_loss = True

    def item(self, number: int, random: torch.Generator) -> dict[str, Tensor]:
        """A sample: the arguments of the model by name."""
        raise NotImplementedError

    def loss(self, results: tuple[Tensor, ...], batch: Mapping[str, Tensor]) -> Tensor:
        return F.cross_entropy(results[0], batch["labels"])

    def weight(self, batch: Mapping[str, Tensor]) -> Tensor | None:
        return None

    def metrics(self, results: tuple[Tensor, ...], batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"accuracy": (results[0].argmax(dim=-1) == batch["labels"]).sum()}


class TextClasses(Task):
    """Sequences of different lengths, each of one class."""

    def item(self, number: int, random: torch.Generator) -> dict[str, Tensor]:
        tokens, valid = _tokens(number, random)
        return {"input_ids": tokens, "attention_mask": valid.long(), "labels": torch.tensor(number % CLASSES)}


class Translation(Task):
    """Sequences of different lengths, each with a label for every valid token."""

    shift = 0

    def item(self, number: int, random: torch.Generator) -> dict[str, Tensor]:
        tokens, valid = _tokens(number, random)
        labels = torch.where(valid, tokens, IGNORED)
        return {"input_ids": tokens, "attention_mask": valid.long(), "labels": labels}

    def loss(self, results: tuple[Tensor, ...], batch: Mapping[str, Tensor]) -> Tensor:
        logits, labels = self._aligned(results, batch)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)

    def weight(self, batch: Mapping[str, Tensor]) -> Tensor | None:
        return (batch["labels"][:, self.shift :] != IGNORED).sum()

    def metrics(self, results: tuple[Tensor, ...], batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        logits, labels = self._aligned(results, batch)
        return {"accuracy": (logits.argmax(dim=-1) == labels).sum()}

    def _aligned(self, results: tuple[Tensor, ...], batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        (logits,) = results
        return logits[:, : logits.shape[1] - self.shift], batch["labels"][:, self.shift :]


class NextToken(Translation):
    """The label of a token is the next one."""

    shift = 1


class Speech(Translation):
    """Sounds, with a transcript of tokens."""

    def item(self, number: int, random: torch.Generator) -> dict[str, Tensor]:
        labels = super().item(number, random)["labels"]
        return {"input_features": torch.randn(8, 2 * LENGTH, generator=random), "labels": labels}


@dataclass(frozen=True)
class Classes(Task):
    """Random numbers of a shape, each of one class."""

    name: str
    shape: tuple[int, ...]

    def item(self, number: int, random: torch.Generator) -> dict[str, Tensor]:
        return {self.name: torch.randn(self.shape, generator=random), "labels": torch.tensor(number % CLASSES)}


@dataclass(frozen=True)
class Reconstruction(Task):
    """Random images, which the model is to return. ``conditions`` are numbers below 10 that it is also given."""

    name: str
    shape: tuple[int, ...]
    conditions: tuple[str, ...] = ()
    result = ("sample",)
    has_own_loss = False

    def item(self, number: int, random: torch.Generator) -> dict[str, Tensor]:
        conditions = {name: torch.tensor((number + i) % 10) for i, name in enumerate(self.conditions)}
        return {self.name: torch.randn(self.shape, generator=random), **conditions}

    def loss(self, results: tuple[Tensor, ...], batch: Mapping[str, Tensor]) -> Tensor:
        return F.mse_loss(results[0], batch[self.name])

    def metrics(self, results: tuple[Tensor, ...], batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"accuracy": (results[0] * batch[self.name] > 0).float().flatten(1).mean(1).sum()}


class Pairs(Task):
    """Texts and images whose embeddings are to be near each other. The loss of a pair does not depend on the others."""

    result = ("text_embeds", "image_embeds")
    has_own_loss = False

    def item(self, number: int, random: torch.Generator) -> dict[str, Tensor]:
        tokens, _ = _tokens(number, random)
        return {"input_ids": tokens, "pixel_values": torch.randn(1, 8, 8, generator=random)}

    def loss(self, results: tuple[Tensor, ...], batch: Mapping[str, Tensor]) -> Tensor:
        return (1 - F.cosine_similarity(*results)).mean()

    def metrics(self, results: tuple[Tensor, ...], batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"accuracy": (F.cosine_similarity(*results) > 0).sum()}


def _tokens(number: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens, and which of them are valid."""
    valid = torch.arange(LENGTH) < 3 + number % (LENGTH - 2)
    return torch.where(valid, torch.randint(2, VOCABULARY, (LENGTH,), generator=random), 0), valid


# The models --------------------------------------------------------------------------------------


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


@dataclass(frozen=True, kw_only=True)
class Exhibit:
    """A model of the zoo.

    Attributes:
        title: its name for readers.
        package: where it comes from.
        build: its constructor.
        task: what it is trained on.
        split: the module at which the second stage begins.
        not_in_stages: the arguments that the model is not given in stages.
    """

    title: str
    package: str
    build: Callable[[], nn.Module]
    task: Task
    split: str
    not_in_stages: tuple[str, ...] = ()


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


# The jobs ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Whole(Job):
    """A model as it is, by its name in ``ZOO``, called with the batch as keyword arguments."""

    name: str

    @property
    def exhibit(self) -> Exhibit:
        return ZOO[self.name]

    def model(self) -> nn.Module:
        return self.exhibit.build()

    def dataset(self, split: Split) -> Dataset[Any]:
        random = torch.Generator().manual_seed(17 if split == "train" else 18)
        samples = 24 if split == "train" else 11  # the last batch of an evaluation is padded
        return Rows([self.exhibit.task.item(number, random) for number in range(samples)])

    def forward(self, model: nn.Module, inputs: Any) -> Any:
        return model(**inputs)

    def loss(self, output: Any, target: Any) -> Tensor:
        loss: Tensor | None = output.loss if self.exhibit.task.has_own_loss else None
        return self.exhibit.task.loss(self._results(output), target) if loss is None else loss

    def weight(self, target: Any) -> Tensor | None:
        return self.exhibit.task.weight(target)

    def metrics(self, output: Any, target: Any) -> Mapping[str, Tensor]:
        return self.exhibit.task.metrics(self._results(output), target)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    def _results(self, output: Any) -> tuple[Tensor, ...]:
        return tuple(getattr(output, name) for name in self.exhibit.task.result)


class TakesDict(nn.Module):
    """Takes a batch as it is, and returns the outputs that the loss needs."""

    def __init__(self, model: nn.Module, exhibit: Exhibit):
        super().__init__()
        self.model = model
        self.exhibit = exhibit

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, ...]:
        output = self.model(**{name: t for name, t in batch.items() if name not in self.exhibit.not_in_stages})
        return tuple(getattr(output, name) for name in self.exhibit.task.result)


@dataclass(frozen=True, kw_only=True)
class Staged(Whole):
    """The same model for stages: the job leaves ``forward`` as it is, and computes the loss."""

    forward = Job.forward

    def model(self) -> nn.Module:
        return TakesDict(super().model(), self.exhibit)

    def loss(self, output: Any, target: Any) -> Tensor:
        return self.exhibit.task.loss(output, target)

    def _results(self, output: Any) -> tuple[Tensor, ...]:
        results: tuple[Tensor, ...] = output
        return results

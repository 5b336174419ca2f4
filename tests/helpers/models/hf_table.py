"""Models of transformers by their type, tiny and with random weights, and what divides or cuts them.

A configuration gets a small value for every size that it has. So a type is a row of the table without code of its own.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from helpers.models.zoo import (
    CLASSES,
    LENGTH,
    VOCABULARY,
    Classes,
    Exhibit,
    NextToken,
    Staged,
    Task,
    TextClasses,
    Whole,
)
from orchestrator.compat.torch import BatchNorm
from orchestrator.model.parity import compare
from orchestrator.model.partial_init import build_fake
from orchestrator.model.precision import Precision
from orchestrator.model.stages import sequence_of
from orchestrator.strategies.data.batch_parts import Division, mean_loss, warning_about_parts
from orchestrator.strategies.data.datasets import example_batch

CPU = torch.device("cpu")
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
    "convnext": {"num_hidden_layers": 4, "hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1], "patch_size": 4},
    "convnextv2": {"num_hidden_layers": 4, "hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1], "patch_size": 4},
    "efficientnet": {"width_coefficient": 0.1, "depth_coefficient": 0.1, "hidden_dim": 128},
    "segformer": {"num_attention_heads": [1, 2, 2, 2], "hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1]},
    "swin": {"num_attention_heads": [2, 2], "depths": [1, 1], "window_size": 2, "patch_size": 4},
    "swinv2": {"num_attention_heads": [2, 2], "depths": [1, 1], "window_size": 2, "patch_size": 4},
}
"""Sizes that a type has as lists, or under names of its own."""


class EndedTexts(TextClasses):
    """The last valid token ends the sequence, and some models classify it."""

    def item(self, number: int, random: torch.Generator) -> dict[str, Tensor]:
        item = super().item(number, random)
        item["input_ids"][item["attention_mask"].sum() - 1] = SIZES["eos_token_id"]
        return item


Kind = Literal["text", "image", "language"]
TASKS: dict[Kind, Task] = {
    "text": EndedTexts(),
    "image": Classes("pixel_values", (3, IMAGE, IMAGE)),
    "language": NextToken(),
}


def build(kind: Kind, model_type: str) -> nn.Module:
    """The model of this type that classifies texts or images, or predicts the next token."""
    import transformers as hf

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        default = hf.AutoConfig.for_model(model_type)
        sizes = {name: value for name, value in SIZES.items() if hasattr(default, name)}
        config = hf.AutoConfig.for_model(model_type, **{**sizes, **OF_TYPE.get(model_type, {})})
        auto = {
            "text": hf.AutoModelForSequenceClassification,
            "image": hf.AutoModelForImageClassification,
            "language": hf.AutoModelForCausalLM,
        }[kind]
        model: nn.Module = auto.from_config(config)
        return model


@dataclass(frozen=True, kw_only=True)
class WholeRow(Whole):
    """A row of the table; ``name`` is the type of the model."""

    kind: Kind

    @property
    def exhibit(self) -> Exhibit:
        make: Callable[[], nn.Module] = lambda: build(self.kind, self.name)  # noqa: E731
        return Exhibit(
            title=self.name,
            package="transformers",
            build=make,
            task=TASKS[self.kind],
            split="",
            not_in_stages=("labels",),
        )


@dataclass(frozen=True, kw_only=True)
class StagedRow(WholeRow, Staged):
    """The same in stages."""


def on_parts(kind: Kind, model_type: str) -> str:
    """What replicas and micro-batches change; empty if nothing."""
    job = WholeRow(kind=kind, name=model_type)
    torch.manual_seed(0)
    division = Division(by="ddp", rows=4, in_turn=True)
    found = warning_about_parts(
        job.model().train(),
        job,
        job.dataset("train"),
        division,
        device=CPU,
        precision=Precision(),
        seed=3,
        loss=mean_loss(job),
    )
    return found or ""


def in_stages(kind: Kind, model_type: str) -> str:
    """Why the model is refused in two stages, or what differs there; empty if it trains as the whole."""
    job = StagedRow(kind=kind, name=model_type)
    inputs, target = example_batch(job, job.dataset("train"), 2)
    try:
        sequence = sequence_of(build_fake(job.model, CPU), inputs, split=(), num_stages=2, job=job)
    except ValueError as e:
        return str(e)
    verdict = compare(
        job.model,
        sequence,
        inputs,
        lambda output: job.loss(output, target),
        device=CPU,
        seed=3,
        precision=Precision(),
        free_bytes=10**12,
    )
    return verdict.error or verdict.note or ""


def has_batch_norm(kind: Kind, model_type: str) -> bool:
    """Whether the model has a BatchNorm, which depends on the division of a batch by nature."""
    with torch.device("meta"):
        return any(isinstance(module, BatchNorm) for module in build(kind, model_type).modules())

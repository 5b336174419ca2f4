"""Hugging Face models, with random weights, train in stages as they do alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from helpers.gang import Gang
from helpers.layouts import pipeline
from helpers.toys import Case, Toy, having, losses, train

transformers = pytest.importorskip("transformers", reason="needs the extra `hf`: pip install -e '.[hf]'")

SIZES = {"vocab_size": 64, "intermediate_size": 64, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
"""Stages draw other random numbers than one worker does."""
CLASSES = 4


def bert() -> nn.Module:
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(**SIZES, num_labels=CLASSES, **NO_DROPOUT)
    )


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=64, n_embd=32, n_head=4, n_layer=2, use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, use_cache=False)
    return transformers.LlamaForCausalLM(config)


def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=2, use_cache=False)
    return transformers.MixtralForCausalLM(config)


def cached_llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, num_key_value_heads=2))


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "bert": (bert, "bert.encoder.layer.1"),
    "gpt2": (gpt2, "transformer.h.1"),
    "llama": (llama, "model.layers.1"),
    "mixtral": (mixtral, "model.layers.1"),
    "cached llama": (cached_llama, "model.layers.1"),
}


@dataclass(frozen=True, kw_only=True)
class Tokens(Toy):
    """Ten tokens in; the first classes of the last logits out."""

    name: str
    lr: float = 0.05

    def model(self) -> nn.Module:
        return MODELS[self.name][0]()

    def item(self, index: int, inputs: Tensor, target: int) -> tuple[Any, Any]:
        return (inputs.abs() * 20).long() % 64, target

    def loss(self, output: Any, target: Tensor) -> Tensor:
        logits = output.logits if output.logits.dim() == 2 else output.logits[:, -1, :CLASSES]
        return F.cross_entropy(logits, target)

    def metrics(self, output: Any, target: Tensor) -> dict[str, Tensor]:
        return {}


def case_of(name: str) -> Case:
    return Case(job=Tokens(name=name), train=having(steps=4, global_batch_size=8))


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "mixtral"])
def test_a_pipeline_has_the_losses_of_one_worker(gang: Gang, name: str) -> None:
    case = replace(case_of(name), options=pipeline("1F1B", 2, (MODELS[name][1],)))
    (alone,) = gang.run(train, case, world_size=1)
    ranks = gang.run(train, case, world_size=2)
    torch.testing.assert_close(losses(ranks), losses([alone]), rtol=1e-5, atol=0)


def test_a_cache_between_stages_is_refused(gang: Gang) -> None:
    case = replace(case_of("cached llama"), options=pipeline("1F1B", 2, ("model.layers.1",)))
    answers = gang.ask(train, case, world_size=2)
    assert "use_cache=False" in str(answers[0].error)

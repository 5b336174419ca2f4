"""Models of Hugging Face as they are: the same losses under every strategy that holds the whole model.

Small, with random weights. Each returns its own loss in a ``ModelOutput``, the decoders with a cache of keys and values
beside it. A batch is a dict, passed as keyword arguments. The sequences have different lengths.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from helpers.gang import Gang
from helpers.layouts import SGD
from helpers.toys import DDP, Case, Rows, Steps, having, losses, make, steps, watched
from orchestrator.job import Job, Split
from orchestrator.protocol.messages import EvalPoint
from orchestrator.strategies.replicated.dp import DPConfig
from orchestrator.worker.data import eval_batches
from orchestrator.worker.evaluation import evaluate

MISSING = "the optional packages are missing: pip install -e '.[hf]'"
pytest.importorskip("transformers", reason=MISSING)

DP = DPConfig(name="dp", num_workers=2, loss_on="device0", verbose=False)
VOCABULARY, LENGTH, CLASSES, IGNORED = 32, 8, 4, -100
SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(vocab_size=VOCABULARY, num_labels=CLASSES, **SMALL, **dropout)
    return BertForSequenceClassification(config)


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = ViTConfig(image_size=8, patch_size=4, num_channels=1, num_labels=CLASSES, **SMALL, **dropout)
    return ViTForImageClassification(config)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    special = {"bos_token_id": 0, "eos_token_id": 1}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=16, **special, **dropout)
    return GPT2LMHeadModel(config)


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=16,
        d_kv=8,
        d_ff=16,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config)


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=1, **SMALL))


def lora() -> nn.Module:
    """GPT-2, of which only adapters are trained."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(gpt2(), LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))


MODELS = {"bert": bert, "vit": vit, "gpt2": gpt2, "t5": t5, "llama": llama, "lora": lora}
CAUSAL = ("gpt2", "llama", "lora")


@dataclass(frozen=True, kw_only=True)
class HuggingFace(Job):
    """A model by its name in ``MODELS``."""

    name: str

    def model(self) -> nn.Module:
        return MODELS[self.name]()

    def dataset(self, split: Split) -> Dataset[Any]:
        random = torch.Generator().manual_seed(17 if split == "train" else 18)
        return Rows([self._item(number, random) for number in range(24 if split == "train" else 11)])

    def forward(self, model: nn.Module, inputs: Any) -> Any:
        return model(**inputs)

    def loss(self, output: Any, target: Any) -> Tensor:
        loss: Tensor = output.loss
        return loss

    def weight(self, target: Any) -> Tensor | None:
        labels = target["labels"]
        if labels.ndim == 1:
            return None
        return (labels[:, self.name in CAUSAL :] != IGNORED).sum()

    def metrics(self, output: Any, target: Any) -> Mapping[str, Tensor]:
        labels, logits = target["labels"], output.logits
        if self.name in CAUSAL:
            labels, logits = labels[:, 1:], logits[:, :-1]
        return {"accuracy": (logits.argmax(dim=-1) == labels).sum()}

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    def _item(self, number: int, random: torch.Generator) -> dict[str, Tensor]:
        if self.name == "vit":
            pixels = torch.randn(1, 8, 8, generator=random)
            return {"pixel_values": pixels, "labels": torch.tensor(number % CLASSES)}
        tokens = torch.randint(2, VOCABULARY, (LENGTH,), generator=random)
        valid = torch.arange(LENGTH) < 3 + number % (LENGTH - 2)
        labels = torch.tensor(number % CLASSES) if self.name == "bert" else torch.where(valid, tokens, IGNORED)
        return {"input_ids": torch.where(valid, tokens, 0), "attention_mask": valid.long(), "labels": labels}


def trained(rank: int, case: Case) -> tuple[Steps, list[EvalPoint]]:
    """Train on this rank, and evaluate after the first step and after the last."""
    strategy = make(case, rank)
    first = watched(strategy, steps(strategy, last=1))
    points = [validated(strategy, rank)]
    rest = watched(strategy, steps(strategy, first=2))
    points.append(validated(strategy, rank))
    return Steps(
        loss_sums=first.loss_sums + rest.loss_sums,
        weights=first.weights + rest.weights,
        norms=first.norms + rest.norms,
        skipped=first.skipped + rest.skipped,
        metrics=first.metrics + rest.metrics,
        model=rest.model,
    ), points


def validated(strategy: Any, rank: int) -> EvalPoint:
    mesh = strategy.context.mesh
    batches = eval_batches(
        strategy.job.dataset("val"),
        collate=strategy.job.collate,
        batch_size=strategy.eval_batch_size,
        data_parallel_size=mesh.data_parallel_size,
        dp_rank=mesh.dp_rank(rank),
        num_workers=0,
        pin_memory=False,
        timeout_s=10,
    )
    return evaluate(strategy, batches, step=0, device=torch.device("cpu"))


def means(ranks: list[tuple[Steps, list[EvalPoint]]]) -> list[float]:
    """Validation loss, accuracy and weight of the run, for each evaluation."""
    values = []
    for points in zip(*(points for _, points in ranks), strict=True):
        weight = sum(p.weight for p in points)
        values += [sum(p.loss_sum for p in points) / weight, sum(p.sums["accuracy"] for p in points) / weight, weight]
    return values


@pytest.mark.parametrize("name", MODELS)
def test_equal_loss(gang: Gang, name: str) -> None:
    if name == "lora":
        pytest.importorskip("peft", reason=MISSING)
    train = having(steps=3, global_batch_size=8)
    alone = gang.run(trained, Case(job=HuggingFace(name=name), train=train), world_size=1)
    expected = losses([seen for seen, _ in alone])
    layouts = {
        "ddp": (Case(job=HuggingFace(name=name), train=train, options=DDP), 2),
        "dp": (Case(job=HuggingFace(name=name), train=train, alone=DP), 1),
    }
    for layout, (case, world_size) in layouts.items():
        ranks = gang.run(trained, case, world_size=world_size)
        found = losses([seen for seen, _ in ranks])
        torch.testing.assert_close(found, expected, rtol=SGD, atol=0, msg=lambda m, layout=layout: f"{layout}: {m}")
        assert means(ranks) == pytest.approx(means(alone), rel=SGD), layout

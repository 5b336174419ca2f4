"""``job=hf job.task=dpo`` on a small Llama, which learns to prefer a sum to a product."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from helpers.models.small_hf import LORA, byte_tokenizer, llama
from jobs.hf import HuggingFace

PAIRS = [{"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a * b + 7)} for a in range(8) for b in range(8)]


def chat_of(pair: dict[str, str]) -> dict[str, Any]:
    """The same pair as conversations."""
    ask = {"role": "user", "content": pair["prompt"]}
    return {name: [ask, {"role": "assistant", "content": pair[name]}] for name in ("chosen", "rejected")}


@dataclass(frozen=True, kw_only=True)
class Preferences(HuggingFace):
    sgd: bool = False

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        if self.sgd:
            return torch.optim.SGD(parameters, lr=0.3)
        return torch.optim.AdamW(parameters, lr=self.learning_rate, eps=1e-5)  # magnifies rounding less than 1e-8


def preferences(folder: Path, *, adapters: bool = False, chats: bool = False, **fields: Any) -> Preferences:
    """The job, with its model and its data in ``folder``."""
    if not (folder / "llama").exists():
        llama().save_pretrained(folder / "llama")
        byte_tokenizer().save_pretrained(folder / "llama")
    pairs = [chat_of(pair) if chats else pair for pair in PAIRS]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return Preferences(
        task="dpo",
        model_name_or_path=str(folder / "llama"),
        train_file=str(folder / "pairs.jsonl"),
        validation_split_percentage=0,
        block_size=16,
        beta=0.3,
        learning_rate=3e-3 if adapters else 1e-3,
        lr_scheduler_type="constant",
        **(LORA if adapters else {}),
        **fields,
    )

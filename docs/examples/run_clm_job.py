"""Train or fine-tune a causal language model on a text: ``run_clm.py`` of transformers as a job.

python -m orchestrator.launch strategy=ddp job._target_=run_clm_job.CausalLM job.model_name_or_path=gpt2 \
    job.train_file=train.txt job.validation_file=val.txt train.steps=1000 train.global_batch_size=8 train.clip_norm=1
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import IterableDataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from orchestrator import Job


@dataclass(frozen=True, kw_only=True)
class CausalLM(Job):
    model_name_or_path: str | None = None  # pretrained; None: model_type with random weights
    model_type: str = "gpt2"
    config_overrides: str = ""
    tokenizer_name: str | None = None
    train_file: str
    validation_file: str
    block_size: int = 1024
    learning_rate: float = 5e-5
    weight_decay: float = 0.0

    def model(self):
        if self.model_name_or_path is not None:
            return Logits(AutoModelForCausalLM.from_pretrained(self.model_name_or_path)).train()
        config = AutoConfig.for_model(self.model_type)
        if self.config_overrides:
            config.update_from_string(self.config_overrides)
        return Logits(AutoModelForCausalLM.from_config(config))

    def dataset(self, split):
        tokenizer = AutoTokenizer.from_pretrained(self.tokenizer_name or self.model_name_or_path)
        lines = (
            Path(self.train_file if split == "train" else self.validation_file).read_text().splitlines(keepends=True)
        )
        tokens = torch.tensor([token for line in tokenizer(lines).input_ids for token in line])
        blocks = tokens[: len(tokens) // self.block_size * self.block_size].view(-1, self.block_size)
        return [{"input_ids": block} for block in blocks]

    def loss(self, output, target):
        return F.cross_entropy(output[:, :-1].flatten(0, 1), target["input_ids"][:, 1:].flatten())

    def metrics(self, output, target):
        hits = output[:, :-1].argmax(dim=-1) == target["input_ids"][:, 1:]
        return {"accuracy": hits.float().mean(dim=1).sum()}

    def parameter_groups(self, named_parameters):
        decayed = [p for name, p in named_parameters if p.dim() > 1]
        others = [p for name, p in named_parameters if p.dim() <= 1]
        return [{"params": decayed, "weight_decay": self.weight_decay}, {"params": others, "weight_decay": 0.0}]

    def optimizer(self, parameters):
        return torch.optim.AdamW(parameters, lr=self.learning_rate)

    def scheduler(self, optimizer, steps):
        return LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=steps)

    @property
    def tokens_per_sample(self):
        return self.block_size


class Logits(nn.Module):
    """Calls the model with the tensors of a batch, and returns its logits."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, batch):
        return self.model(**batch, use_cache=False).logits


@dataclass(frozen=True, kw_only=True)
class InScriptOrder(CausalLM):
    """The blocks in the order of the script's ``Trainer``, and its loss, to compare the two curves step by step."""

    script_seed: int = 42

    def loss(self, output, target):
        """Divide by all tokens of a block, as ``Trainer`` does, although the first one is not predicted."""
        return super().loss(output, target) * (self.block_size - 1) / self.block_size

    def dataset(self, split):
        dataset = super().dataset(split)
        return Shuffled(dataset, self.script_seed) if split == "train" else dataset


class Shuffled(IterableDataset):
    """The samples in a new random order in each epoch."""

    def __init__(self, dataset, seed):
        self.dataset, self.seed, self.epoch = dataset, seed, 0

    def __len__(self):
        return len(self.dataset)

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        random = torch.Generator().manual_seed(self.seed + self.epoch)
        return (self.dataset[i] for i in torch.randperm(len(self), generator=random).tolist())

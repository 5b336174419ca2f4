"""Train the GPT of nanoGPT: its ``train.py`` as a job, which uses its ``model.py`` and its data as they are.

python -m orchestrator.launch strategy=ddp job._target_=nanogpt_job.NanoGPT job.data=data/openwebtext \
    train.steps=600000 train.global_batch_size=480 train.grad_accumulation=40 train.clip_norm=1
"""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset

from orchestrator import Job


@dataclass(frozen=True, kw_only=True)
class NanoGPT(Job):
    data: str  # the directory with train.bin and val.bin
    vocab_size: int = 50304
    block_size: int = 1024
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    bias: bool = False
    learning_rate: float = 6e-4
    min_lr: float = 6e-5
    warmup_iters: int = 2000
    weight_decay: float = 0.1
    beta2: float = 0.95
    eval_blocks: int = 2400

    def model(self):
        return Logits(self.gpt())

    def gpt(self):
        from model import GPT, GPTConfig  # the model.py of nanoGPT

        sizes = ("vocab_size", "block_size", "n_layer", "n_head", "n_embd", "bias")
        return GPT(GPTConfig(**{name: getattr(self, name) for name in sizes}))

    def dataset(self, split):
        blocks = Blocks(Path(self.data) / f"{split}.bin", self.block_size)
        if split == "train":
            return RandomBlocks(blocks, torch.Generator().manual_seed(1337).get_state())
        every = max(1, len(blocks) // self.eval_blocks)
        return [blocks[start] for start in range(0, len(blocks), every)][: self.eval_blocks]

    def loss(self, output, target):
        return F.cross_entropy(output.flatten(0, 1), target["targets"].flatten())

    def parameter_groups(self, named_parameters):
        matrices = [parameter for _, parameter in named_parameters if parameter.dim() >= 2]
        others = [parameter for _, parameter in named_parameters if parameter.dim() < 2]
        return [{"params": matrices, "weight_decay": self.weight_decay}, {"params": others, "weight_decay": 0.0}]

    def optimizer(self, parameters):
        return torch.optim.AdamW(parameters, lr=self.learning_rate, betas=(0.9, self.beta2))

    def scheduler(self, optimizer, steps):
        least = self.min_lr / self.learning_rate

        def factor(step):
            if step < self.warmup_iters:
                return (step + 1) / (self.warmup_iters + 1)
            progress = min(1.0, (step - self.warmup_iters) / max(1, steps - self.warmup_iters))
            return least + (1 - least) * (1 + math.cos(math.pi * progress)) / 2

        return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

    @property
    def tokens_per_sample(self):
        return self.block_size


class Logits(nn.Module):
    """Returns the logits of every position, as the model does only if it is given targets."""

    def __init__(self, gpt):
        super().__init__()
        self.gpt = gpt

    def forward(self, batch):
        logits, _ = self.gpt(batch["idx"], batch["targets"])
        return logits


class Blocks:
    """The blocks of a file of tokens, one for each token that it can begin with."""

    def __init__(self, path, block_size):
        self.tokens, self.size = np.memmap(path, dtype=np.uint16, mode="r"), block_size

    def __len__(self):
        return len(self.tokens) - self.size

    def __getitem__(self, start):
        tokens = torch.from_numpy(self.tokens[start : start + self.size + 1].astype(np.int64))
        return {"idx": tokens[:-1], "targets": tokens[1:]}


class RandomBlocks(IterableDataset):
    """Blocks that begin anywhere, without end. A checkpoint keeps the state of the random numbers."""

    def __init__(self, blocks, state):
        self.blocks, self.state = blocks, state

    def __iter__(self):
        self.generator = torch.Generator()
        self.generator.set_state(self.state)
        while True:
            yield self.blocks[int(torch.randint(len(self.blocks), (), generator=self.generator))]

    def state_dict(self):
        return {"generator": self.generator.get_state().tolist()}

    def load_state_dict(self, state):
        self.state = torch.tensor(state["generator"], dtype=torch.uint8)


@dataclass(frozen=True, kw_only=True)
class InScriptOrder(NanoGPT):
    """The blocks that the script draws, to compare the two curves step by step."""

    batch_size: int = 12
    eval_iters: int = 200

    def dataset(self, split):
        if split != "train":
            return super().dataset(split)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1337)
            self.gpt()
            state = torch.get_rng_state()
        return ScriptBlocks(super().dataset(split).blocks, state, self.batch_size, self.eval_iters)


class ScriptBlocks(RandomBlocks):
    """The script draws its first batch, then the batches of an evaluation, and then its others."""

    def __init__(self, blocks, state, batch_size, eval_iters):
        super().__init__(blocks, state)
        self.batch_size, self.evaluated = batch_size, 2 * eval_iters * batch_size

    def __iter__(self):
        for number, block in enumerate(super().__iter__(), start=1):
            if number == self.batch_size:
                torch.randint(len(self.blocks), (self.evaluated,), generator=self.generator)
            yield block

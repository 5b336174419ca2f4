"""A byte-level transformer language model, trained on Python's documentation or on any text file.

    python -m orchestrator.launch job=gpt strategy=ddp job.path=my.txt

The model is an ``nn.Sequential`` of named blocks, so a pipeline can be cut between any two.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset

from orchestrator.job import Job, Split

BYTES = 256
VAL_PERCENT = 10


@dataclass(frozen=True, kw_only=True)
class GPT(Job):
    """A decoder-only transformer (Vaswani et al., 2017, https://arxiv.org/abs/1706.03762) with pre-layer norms.

    ``path`` is a text file, or None for the help texts that Python ships in ``pydoc_data.topics``. After an
    evaluation and at the end, the model writes ``sample_bytes`` bytes, drawn with ``temperature``.
    """

    layers: int = 4
    width: int = 64
    heads: int = 4
    context: int = 64
    dropout: float = 0.0
    lr: float = 3e-3
    warmup_steps: int = 20
    path: str | None = None
    sample_bytes: int = 200
    temperature: float = 0.8

    def model(self) -> nn.Module:
        stack: OrderedDict[str, nn.Module] = OrderedDict()
        stack["embed"] = Embed(width=self.width, context=self.context)
        for i in range(self.layers):
            stack[f"block{i}"] = Block(width=self.width, heads=self.heads, layers=self.layers, dropout=self.dropout)
        stack["norm"] = nn.LayerNorm(self.width)
        stack["head"] = linear(self.width, BYTES)
        return nn.Sequential(stack)

    def dataset(self, split: Split) -> Dataset[tuple[Tensor, Tensor]]:
        text = torch.frombuffer(bytearray(self.text()), dtype=torch.uint8)
        held_out = len(text) * VAL_PERCENT // 100
        return Windows(text[-held_out:] if split == "val" else text[:-held_out], self.context)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), target.flatten())

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=self.lr, betas=(0.9, 0.95), weight_decay=0.1)

    def scheduler(self, optimizer: torch.optim.Optimizer, steps: int) -> LambdaLR:
        """A linear warm-up, then a cosine decay to a tenth of ``lr``."""

        def factor(step: int) -> float:
            if step < self.warmup_steps:
                return (step + 1) / (self.warmup_steps + 1)
            progress = (step - self.warmup_steps) / max(1, steps - self.warmup_steps)
            return 0.55 + 0.45 * math.cos(math.pi * min(1.0, progress))

        return LambdaLR(optimizer, factor)

    def metrics(self, output: Tensor, target: Tensor) -> Mapping[str, Tensor]:
        correct = output.argmax(dim=-1) == target
        return {"accuracy": correct.float().mean(dim=-1).sum()}  # each sample's fraction of correct bytes

    @property
    def tokens_per_sample(self) -> int:
        return self.context

    def sample(self, model: nn.Module, generator: torch.Generator) -> str:
        """Generate ``sample_bytes`` bytes after a newline."""
        device = next(model.parameters()).device
        text = torch.tensor([[ord("\n")]], device=device)
        for _ in range(self.sample_bytes):
            logits = model(text[:, -self.context :])[0, -1].float() / self.temperature
            probabilities = logits.softmax(dim=-1).to(generator.device)
            drawn = torch.multinomial(probabilities, 1, generator=generator)
            text = torch.cat([text, drawn.to(device)[None]], dim=1)
        return bytes(text[0, 1:].tolist()).decode(errors="replace")

    def text(self) -> bytes:
        """Read the text to train on.

        Raises:
            ValueError: ``path`` cannot be read, or Python's help texts are not installed.
        """
        if self.path is None:
            try:
                from pydoc_data.topics import topics
            except ImportError as e:
                raise ValueError("job.path=null: pydoc_data.topics is not installed; set it to a text file") from e
            return "".join(topics[name] for name in sorted(topics)).encode()
        try:
            return Path(self.path).expanduser().read_bytes()
        except OSError as e:
            raise ValueError(f"job.path={self.path}: cannot be read ({e.strerror}); set it to a text file") from e

    def check(self) -> None:
        for name in ("layers", "width", "heads", "context"):
            if getattr(self, name) < 1:
                raise ValueError(f"job.{name}={getattr(self, name)}: must be at least 1")
        for name in ("warmup_steps", "sample_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"job.{name}={getattr(self, name)}: must be at least 0")
        for name in ("lr", "temperature"):
            if getattr(self, name) <= 0:
                raise ValueError(f"job.{name}={getattr(self, name):g}: must be greater than 0")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"job.dropout={self.dropout:g}: must be in [0, 1)")
        if self.width % self.heads:
            raise ValueError(f"job.width={self.width}: must be a multiple of job.heads={self.heads}")
        size, least = len(self.text()), (self.context + 1) * 100 // VAL_PERCENT
        if size < least:
            raise ValueError(
                f"job.path={self.path or 'null'}: has {size} bytes, but job.context={self.context} needs "
                f"{least}; use a longer text or lower job.context"
            )


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Consecutive windows ``(input, target)`` of a uint8 text, both int64 of shape (context,).

    The target is the input shifted by one byte.
    """

    def __init__(self, text: Tensor, context: int):
        self.windows = text.unfold(0, context + 1, context)  # a view

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self.windows[index].long()
        return window[:-1], window[1:]


class Embed(nn.Module):
    """Embeds bytes and their positions: (batch, time) -> (batch, time, width)."""

    def __init__(self, *, width: int, context: int):
        super().__init__()
        self.byte = nn.Embedding(BYTES, width)
        self.position = nn.Embedding(context, width)
        for table in (self.byte, self.position):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        positions = torch.arange(text.shape[1], device=text.device)
        out: Tensor = self.byte(text) + self.position(positions)
        return out


class Block(nn.Module):
    """Causal self-attention and an MLP, each after a layer norm: (batch, time, width) -> (batch, time, width)."""

    def __init__(self, *, width: int, heads: int, layers: int, dropout: float):
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        residual_std = 0.02 / math.sqrt(2 * layers)  # keeps the variance of the residual stream independent of depth
        self.norm1 = nn.LayerNorm(width)
        self.qkv = linear(width, 3 * width)
        self.mix = linear(width, width, std=residual_std)
        self.norm2 = nn.LayerNorm(width)
        self.up = linear(width, 4 * width)
        self.down = linear(4 * width, width, std=residual_std)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attend(self.norm1(x)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))

    def attend(self, x: Tensor) -> Tensor:
        # (batch, time, 3 * width) -> three of (batch, heads, time, width / heads)
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.mix(mixed.transpose(1, 2).flatten(2))
        return out

    def drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)


def linear(inputs: int, outputs: int, *, std: float = 0.02) -> nn.Linear:
    """Return a linear layer without bias whose weights are drawn from a normal distribution."""
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=std)
    return layer

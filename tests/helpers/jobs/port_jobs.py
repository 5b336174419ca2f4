"""Ports of docs/ports.md, with small models and random images in place of what other packages have."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import imagenet_job
import nanogpt_job


class TokenModel(nn.Module):
    """Is called, and answers, as the GPT of nanoGPT."""

    def __init__(self, vocabulary: int):
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(vocabulary, 8), nn.LayerNorm(8), nn.Linear(8, vocabulary)

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.norm(self.embedding(idx)))
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class NanoGPT(nanogpt_job.InScriptOrder):
    def gpt(self) -> nn.Module:
        return TokenModel(self.vocab_size)


class ImageNet(imagenet_job.ImageNet):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 6))

    def dataset(self, split: str) -> Any:
        random = torch.Generator().manual_seed(len(split))
        return TensorDataset(torch.randn(40, 3, 8, 8, generator=random), torch.arange(40) % 6)

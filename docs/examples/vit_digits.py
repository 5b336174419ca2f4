"""Classify images with a vision transformer of Hugging Face: ``ViTForImageClassification`` as it is.

python -m orchestrator.launch strategy=pipeline job._target_=vit_digits.ViT
"""

from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from transformers import ViTConfig, ViTForImageClassification

from orchestrator import Job


@dataclass(frozen=True, kw_only=True)
class ViT(Job):
    """``pretrained`` is a model of the hub or a folder; None: a small one with random weights, for 8 x 8 pixels."""

    pretrained: str | None = None
    layers: int = 4
    lr: float = 1e-3

    def model(self):
        if self.pretrained is not None:
            return ViTForImageClassification.from_pretrained(
                self.pretrained, num_labels=10, ignore_mismatched_sizes=True
            )
        return ViTForImageClassification(
            ViTConfig(
                image_size=8,
                patch_size=2,
                num_channels=1,
                hidden_size=64,
                num_hidden_layers=self.layers,
                num_attention_heads=4,
                intermediate_size=128,
                num_labels=10,
            )
        )

    def dataset(self, split):
        data = load_digits()
        pixels = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
        chosen = slice(0, 1500) if split == "train" else slice(1500, None)
        return TensorDataset(pixels[chosen], torch.tensor(data.target)[chosen])

    @property
    def collate(self):
        return None if self.pretrained is None else self.enlarge

    def enlarge(self, samples):
        """Join samples to a batch of images of the size that the pretrained model takes."""
        config = ViTConfig.from_pretrained(self.pretrained)
        images = torch.stack([image.expand(config.num_channels, -1, -1) for image, _ in samples])
        images = F.interpolate(images, size=config.image_size, mode="bilinear")
        return images, torch.stack([label for _, label in samples])

    def loss(self, output, target):
        return F.cross_entropy(output.logits, target)

    def metrics(self, output, target):
        return {"accuracy": (output.logits.argmax(dim=-1) == target).sum()}

    def optimizer(self, parameters):
        return torch.optim.AdamW(parameters, lr=self.lr)

"""A GAN that draws handwritten digits: two models, two optimizers, and a training step of its own.

python -m orchestrator.launch strategy=ddp job._target_=digits_gan.GAN train.steps=2000
"""

from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.data import IterableDataset

from orchestrator import Job


@dataclass(frozen=True, kw_only=True)
class GAN(Job):
    noise: int = 16  # numbers that an image is made of
    width: int = 128
    lr: float = 1e-3

    def model(self):
        generator = nn.Sequential(
            nn.Linear(self.noise, self.width),
            nn.ReLU(),
            nn.Linear(self.width, self.width),
            nn.ReLU(),
            nn.Linear(self.width, 64),
            nn.Sigmoid(),
            nn.Unflatten(1, (1, 8, 8)),
        )
        discriminator = nn.Sequential(
            nn.Flatten(),
            spectral_norm(nn.Linear(64, self.width)),
            nn.LeakyReLU(0.2),
            spectral_norm(nn.Linear(self.width, self.width)),
            nn.LeakyReLU(0.2),
            spectral_norm(nn.Linear(self.width, 1)),
        )
        return nn.ModuleDict({"generator": generator, "discriminator": discriminator})

    def dataset(self, split):
        return ImagesWithNoise(self.noise) if split == "train" else None

    def optimizer(self, parameters):
        return torch.optim.Adam(parameters, lr=self.lr, betas=(0.5, 0.999))

    def training_step(self, models, batch, optimizers):
        real, noise = batch
        generator, discriminator = models["generator"], models["discriminator"]
        fake = generator(noise)

        discriminator_loss = judge(discriminator(real), 1.0) + judge(discriminator(fake.detach()), 0.0)
        discriminator_loss.backward()
        optimizers["discriminator"].step()

        loss = judge(discriminator(fake), 1.0)
        loss.backward()
        optimizers["generator"].step()
        return {"loss": loss, "discriminator_loss": discriminator_loss}

    def sample(self, model, generator):
        device = next(model.parameters()).device
        return {"digits": model["generator"](torch.randn(16, self.noise, generator=generator).to(device))}


def judge(logits, wanted):
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, wanted))


class ImagesWithNoise(IterableDataset):
    """The images in another order in each epoch, and new noise for each. The same on every worker."""

    def __init__(self, noise):
        self.images = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1) / 16
        self.noise, self.epoch = noise, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        random = torch.Generator().manual_seed(self.epoch)
        order = torch.randperm(len(self.images), generator=random)
        noise = torch.randn(len(self.images), self.noise, generator=random)
        return zip(self.images[order], noise, strict=True)

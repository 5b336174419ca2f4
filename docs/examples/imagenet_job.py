"""Train a network of torchvision on folders of images: the ImageNet example of pytorch/examples as a job.

python -m orchestrator.launch strategy=ddp strategy.sync_batchnorm=true job._target_=imagenet_job.ImageNet \
    job.data=imagenet train.steps=450000 train.global_batch_size=256 train.eval_every=5000 data.num_workers=4
"""

import contextlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

from orchestrator import Job


@dataclass(frozen=True, kw_only=True)
class ImageNet(Job):
    data: str  # the directory with train/<class>/ and val/<class>/
    arch: str = "resnet18"
    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 1e-4

    def model(self):
        from torchvision.models import get_model

        return get_model(self.arch)

    def dataset(self, split):
        from torchvision import transforms
        from torchvision.datasets import ImageFolder

        cut = {
            "train": [transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip()],
            "val": [transforms.Resize(256), transforms.CenterCrop(224)],
        }[split]
        normalize = transforms.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])
        return ImageFolder(Path(self.data) / split, transforms.Compose([*cut, transforms.ToTensor(), normalize]))

    def loss(self, output, target):
        return F.cross_entropy(output, target)

    def metrics(self, output, target):
        hits = output.topk(5, dim=1).indices == target.unsqueeze(1)
        return {"acc1": hits[:, 0].sum(), "acc5": hits.sum()}

    def optimizer(self, parameters):
        return torch.optim.SGD(parameters, self.lr, momentum=self.momentum, weight_decay=self.weight_decay)

    def scheduler(self, optimizer, steps, steps_per_epoch):
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=round(30 * steps_per_epoch), gamma=0.1)


@dataclass(frozen=True, kw_only=True)
class InScriptOrder(ImageNet):
    """The images that the script draws and cuts with ``--workers 0``, to compare the two curves step by step."""

    script_seed: int = 0

    def dataset(self, split):
        dataset = super().dataset(split)
        if split != "train":
            return dataset
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.script_seed)
            self.model()
            return Shuffled(dataset, torch.get_rng_state())


class Shuffled(IterableDataset):
    """The samples as a ``DataLoader`` draws them that takes all random numbers from torch's global generator."""

    def __init__(self, dataset, state):
        self.loader, self.state = DataLoader(dataset, batch_size=None, shuffle=True), state

    def __len__(self):
        return len(self.loader)

    def __iter__(self):
        with self.random():
            samples = iter(self.loader)
        for _ in range(len(self)):
            with self.random():
                sample = next(samples)
            yield sample
        with self.random():
            torch.empty((), dtype=torch.int64).random_()  # the script's validation begins to read

    @contextlib.contextmanager
    def random(self):
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self.state)
            yield
            self.state = torch.get_rng_state()

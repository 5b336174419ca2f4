"""ResNet-50 on random images, as in PyTorch's model-parallel tutorial. With the sizes of the tutorial:

    python -m orchestrator.launch job=resnet50 job.image_size=128 train.global_batch_size=120 train.steps=3

Parameters have the names and shapes of torchvision's ResNet-50, so ``job.weights`` can load its weights. To train
torchvision's own module, use ``job._target_=my_package.Theirs`` with::

    @dataclass(frozen=True, kw_only=True)
    class Theirs(ResNet50):
        def model(self):
            return torchvision.models.resnet50(num_classes=self.num_classes)

To train on your own images, override ``dataset`` and ``loss`` as well.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from orchestrator.job import Job, Split

EXPANSION = 4
"""The ratio of a block's output channels to the channels of its 3 x 3 convolution."""


@dataclass(frozen=True, kw_only=True)
class ResNet50(Job):
    """ResNet-50 (He et al., 2015, https://arxiv.org/abs/1512.03385), with mean squared error against random labels.

    BatchNorm takes its statistics from each worker's micro-batch, so the loss depends on how a batch is divided.

    Attributes:
        width: the number of channels in the first layer's blocks.
        blocks: the number of blocks in each layer.
        weights: a safetensors file with torchvision's names; None for random weights.
    """

    image_size: int = 32
    num_images: int = 512
    num_classes: int = 1000
    width: int = 64
    blocks: tuple[int, int, int, int] = (3, 4, 6, 3)
    lr: float = 0.05
    momentum: float = 0.9
    weights: str | None = None

    def model(self) -> nn.Module:
        model = resnet(width=self.width, blocks=self.blocks, num_classes=self.num_classes)
        if self.weights is not None:
            # Read arrays, not tensors: a pipeline records tensor operations to build its stages, but not file access.
            with safe_open(Path(self.weights).expanduser(), framework="numpy") as file:
                model.load_state_dict({name: torch.from_numpy(file.get_tensor(name)) for name in file.keys()})  # noqa: SIM118
        return model

    def dataset(self, split: Split) -> Dataset[tuple[Tensor, int]]:
        images = self.num_images if split == "train" else max(1, self.num_images // 8)
        return RandomImages(split, images=images, image_size=self.image_size, num_classes=self.num_classes)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, F.one_hot(target, self.num_classes).to(output.dtype))

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=self.lr, momentum=self.momentum)

    def check(self) -> None:
        for name in ("image_size", "num_images", "num_classes", "width"):
            if getattr(self, name) < 1:
                raise ValueError(f"job.{name}={getattr(self, name)}: must be at least 1")
        if min(self.blocks) < 1:
            raise ValueError(f"job.blocks={list(self.blocks)}: each must be at least 1")
        if self.lr <= 0:
            raise ValueError(f"job.lr={self.lr:g}: must be greater than 0")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"job.momentum={self.momentum:g}: must be in [0, 1)")
        if self.weights is not None:
            self._check_weights(self.weights)

    def _check_weights(self, weights: str) -> None:
        with torch.device("meta"):
            model = resnet(width=self.width, blocks=self.blocks, num_classes=self.num_classes)
        expected = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
        try:
            with safe_open(Path(weights).expanduser(), framework="pt") as file:
                found = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - no dict
        except (OSError, SafetensorError) as e:
            raise ValueError(f"job.weights={weights}: cannot be read ({e}); set it to a safetensors file") from e
        differing = sorted(
            name
            for name in expected.keys() | found.keys()
            if found.get(name) != expected.get(name) and not name.endswith("num_batches_tracked")  # old files lack it
        )
        if differing:
            name, more = differing[0], f", and {len(differing) - 1} more" if differing[1:] else ""
            raise ValueError(
                f"job.weights={weights}: of another model: {name}: {found.get(name, 'none')} in the file, "
                f"{expected.get(name, 'none')} in the model{more}; set job.num_classes, job.width "
                "and job.blocks to those of the file, or use another file"
            )


class RandomImages(Dataset[tuple[Tensor, int]]):
    """Items ``(image, label)``: float32 of shape (3, image_size, image_size) and an int, generated on access."""

    def __init__(self, split: Split, *, images: int, image_size: int, num_classes: int):
        self.split = split
        self.images = images
        self.image_size = image_size
        self.num_classes = num_classes

    def __len__(self) -> int:
        return self.images

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        random = torch.Generator().manual_seed(2 * index + (self.split == "val"))
        image = torch.randn(3, self.image_size, self.image_size, generator=random)
        return image, int(torch.randint(self.num_classes, (), generator=random))


def resnet(*, width: int, blocks: tuple[int, ...], num_classes: int) -> nn.Sequential:
    """Return a bottleneck ResNet with strides in the 3 x 3 convolutions, as torchvision's.

    It maps (batch, 3, height, width) to (batch, num_classes).
    """
    stack: OrderedDict[str, nn.Module] = OrderedDict()
    stack["conv1"] = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
    stack["bn1"] = nn.BatchNorm2d(width)
    stack["relu"] = nn.ReLU()  # not in place, because a stage may begin here and must not change its input
    stack["maxpool"] = nn.MaxPool2d(3, stride=2, padding=1)
    channels = width
    for i, depth in enumerate(blocks):
        layer = []
        for k in range(depth):
            layer.append(Bottleneck(channels, width << i, stride=2 if i > 0 and k == 0 else 1))
            channels = (width << i) * EXPANSION
        stack[f"layer{i + 1}"] = nn.Sequential(*layer)
    stack["avgpool"] = nn.AdaptiveAvgPool2d(1)
    stack["flatten"] = nn.Flatten()
    stack["fc"] = nn.Linear(channels, num_classes)
    model = nn.Sequential(stack)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


class Bottleneck(nn.Module):
    """Convolutions 1 x 1, 3 x 3, 1 x 1 with a shortcut: (batch, channels, h, w) -> (batch, 4 * width, h', w')."""

    def __init__(self, channels: int, width: int, *, stride: int):
        super().__init__()
        out = width * EXPANSION
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or channels != out:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels, out, 1, stride=stride, bias=False),
                nn.BatchNorm2d(out),
            )

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        out: Tensor = self.relu(self.bn3(self.conv3(x)) + shortcut)
        return out

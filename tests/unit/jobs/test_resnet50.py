"""ResNet-50 is torchvision's by name, shape and number, and can be cut between any two of its layers."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from helpers.files.golden import Golden
from helpers.ranks.job_trials import errors, trained
from jobs.resnet50 import ResNet50, resnet
from orchestrator.model.partial_init import build_part

TINY: dict[str, Any] = {"width": 4, "blocks": [1, 1, 1, 1], "num_classes": 10, "num_images": 40}
TARGET = "jobs.resnet50.ResNet50"

# Of `torchvision.models.resnet50()`, torchvision 0.29: names and shapes, and what it makes of `numbers` below.
NAMES_AND_SHAPES = "2d5b8870b35e15302b693633772b7dd09604c71f966194756edea01b1c1ca347"
OUTPUT = [[0.063003, -0.131994, -0.210139], [-0.060439, -0.174003, -0.233842]]


def tiny(**fields: Any) -> ResNet50:
    return ResNet50(**{**TINY, "blocks": (1, 1, 1, 1), **fields})


def test_it_has_the_names_and_shapes_of_torchvision() -> None:
    model = ResNet50().model()
    listed = "\n".join(f"{name} {list(tensor.shape)}" for name, tensor in sorted(model.state_dict().items()))
    assert hashlib.sha256(listed.encode()).hexdigest() == NAMES_AND_SHAPES
    assert sum(p.numel() for p in model.parameters()) == 25_557_032


def test_it_computes_what_torchvision_computes() -> None:
    model = resnet(width=64, blocks=(3, 4, 6, 3), num_classes=1000)
    numbers = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.05 * torch.randn(parameter.shape, generator=numbers))
        output = model(torch.randn(2, 3, 64, 64, generator=numbers))
    torch.testing.assert_close(output[:, :3], torch.tensor(OUTPUT), rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_it_can_be_cut_between_any_two_layers() -> None:
    model = tiny().model()
    assert isinstance(model, nn.Sequential)
    stages = ["conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3", "layer4", "avgpool", "flatten", "fc"]
    assert [name for name, _ in model.named_children()] == stages
    images = torch.randn(4, 3, 32, 32)
    expected = model(images)
    for cut in range(1, len(model)):
        received = model[:cut](images).detach().requires_grad_()  # as a pipeline's stage receives it
        output = model[cut:](received)
        assert output.equal(expected)
        output.sum().backward()
        assert received.grad is not None


def test_images_are_made_from_their_index_alone() -> None:
    job = tiny(image_size=20)
    train, val = job.dataset("train"), job.dataset("val")
    assert (len(train), len(val)) == (40, 5)  # type: ignore[arg-type]
    images = [*(train[i][0] for i in range(40)), *(val[i][0] for i in range(5))]
    assert {tuple(image.shape) for image in images} == {(3, 20, 20)}
    assert len({image.sum().item() for image in images}) == 45
    again = job.dataset("train")[7]
    assert again[0].equal(images[7])
    assert again[1] == train[7][1]
    assert len({train[i][1] for i in range(40)}) > 5, "labels of every class"
    assert not any(isinstance(v, Tensor) for v in vars(train).values()), "kept in memory"


def test_it_learns() -> None:
    _, losses = trained(tiny(lr=0.02), steps=20, batch=10)
    assert sum(losses[-5:]) < sum(losses[:5]) / 2


@pytest.mark.slow
def test_weights_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "resnet.safetensors"
    torch.manual_seed(0)
    saved = tiny().model()
    # Files from before BatchNorm counted its batches have no such tensors.
    save_file({k: v for k, v in saved.state_dict().items() if not k.endswith("num_batches_tracked")}, file)
    assert errors(TARGET, **TINY, weights=str(file)) == []
    torch.manual_seed(1)
    loaded = tiny(weights=str(file)).model()
    images = torch.randn(2, 3, 32, 32)
    assert loaded(images).equal(saved(images))
    assert not tiny().model()(images).equal(saved(images))
    part = build_part(tiny(weights=str(file)).model, lambda name: name.startswith("fc."), seed=0)
    assert part.get_parameter("fc.weight").equal(saved.get_parameter("fc.weight"))


def test_weights_of_another_model_are_refused(tmp_path: Path, golden: Golden) -> None:
    file = tmp_path / "resnet.safetensors"
    save_file(tiny(num_classes=7).model().state_dict(), file)
    [error] = errors(TARGET, **TINY, weights=str(file))
    golden.says(error)
    save_file({"encoder.weight": torch.zeros(3)}, file)
    [error] = errors(TARGET, **TINY, weights=str(file))
    golden.says(error)
    save_file({**tiny().model().state_dict(), "ema.fc.bias": torch.zeros(3)}, file)
    [error] = errors(TARGET, **TINY, weights=str(file))
    golden.says(error)


@pytest.mark.parametrize("content", [None, b"no safetensors"])
def test_weights_that_cannot_be_read_are_refused(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "resnet.safetensors"
    if content is not None:
        file.write_bytes(content)
    [error] = errors(TARGET, **TINY, weights=str(file))
    assert error.startswith(f"job.weights={file}: cannot be read")
    assert "\n" not in error

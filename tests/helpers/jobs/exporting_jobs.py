"""A job whose export is right, or wrong in a way of its choice."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from jobs.digits import Digits


class Noisy(nn.Module):
    """Draws in evaluation mode, too."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + torch.rand_like(inputs)


@dataclass(frozen=True, kw_only=True)
class Exporting(Digits):
    """``how``: what is wrong. Its module ``1`` is the first layer with weights."""

    export_formats = ("mine", "another")
    hidden: int = 8
    depth: int = 2
    how: str = ""

    def model(self) -> nn.Module:
        model = super().model()
        if self.how == "random":
            model.add_module("noise", Noisy())
        return model

    def dataset(self, split: str) -> Any:
        if self.how in ("no data", "no input"):
            raise FileNotFoundError("the data is gone")
        return super().dataset(split)

    def example_inputs(self) -> Any:
        return torch.rand(2, 64) if self.how == "no data" else None

    def export(self, weights: Mapping[str, Tensor], directory: Path, format: str) -> None:
        directory.mkdir()
        tensors = {name: tensor.clone() for name, tensor in weights.items()}
        last = next(name for name in reversed(tensors) if name.endswith("weight"))
        if self.how == "other weight":
            tensors[last] *= 1.01
        if self.how == "NaN":
            tensors[last][0, 0] = torch.nan
        if self.how == "bfloat16":
            tensors = {name: tensor.bfloat16() for name, tensor in tensors.items()}
        save_file(tensors, directory / "weights.safetensors")

    def exported(self, directory: Path, format: str) -> nn.Module | None:
        if self.how == "no way":
            return None
        if self.how == "killed":
            os.kill(os.getpid(), 9)
        if self.how == "ends":
            sys.exit(0)
        if self.how == "no package":
            import no_such_package  # noqa: F401
        model = self.model()
        if self.how == "other form":
            return nn.Sequential(model, nn.Linear(10, 3))
        if self.how == "cannot load":
            raise RuntimeError("size mismatch for head")
        if self.how == "random":
            model.add_module("noise", nn.Sequential(Noisy(), Noisy()))  # draws other numbers
        tensors = load_file(directory / "weights.safetensors")
        model.load_state_dict(tensors)
        return model.bfloat16().float() if self.how == "bfloat16" else model

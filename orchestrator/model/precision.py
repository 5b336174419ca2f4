"""The precision of a model: the dtype of its tensors, and what its forward passes are computed in."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.model.batch import map_tensors

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Precision:
    """What a model is stored and computed in.

    Attributes:
        device_type: the type of the device that computes.
        autocast_dtype: what autocast computes forward passes and losses in; None for no autocast.
        keeps_casts: whether autocast keeps the casts of parameters up to the end of a forward pass, for their next use.
        model_dtype: the dtype of floating-point parameters, buffers and inputs; None to leave them as they are.
    """

    device_type: str = "cpu"
    autocast_dtype: torch.dtype | None = None
    keeps_casts: bool = True
    model_dtype: torch.dtype | None = None

    @classmethod
    def named(cls, name: str, device_type: str) -> Precision:
        """Return the precision that ``train.precision`` names; ``auto`` is float32, because only workers know more."""
        return cls(
            device_type=device_type,
            autocast_dtype=_AUTOCAST.get(name),
            model_dtype=torch.bfloat16 if name == "bf16-true" else None,
        )

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Return the context in which a forward pass and its loss run."""
        dtype = self.autocast_dtype
        return torch.autocast(self.device_type, dtype=dtype, enabled=dtype is not None, cache_enabled=self.keeps_casts)

    def converted(self, build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        """Return a constructor whose model has parameters and buffers of ``model_dtype``."""
        if self.model_dtype is None:
            return build
        return lambda: build().to(self.model_dtype)

    def inputs(self, tree: Any) -> Any:
        """Return the inputs of a model with their floating-point tensors in ``model_dtype``."""
        dtype = self.model_dtype
        if dtype is None:
            return tree
        return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, tree)

    def outputs(self, tree: Any) -> Any:
        """Return the outputs of a model for its loss and metrics: float32 in place of ``model_dtype``."""
        dtype = self.model_dtype
        if dtype is None:
            return tree
        return map_tensors(lambda tensor: tensor.float() if tensor.dtype == dtype else tensor, tree)


def summable(tensor: Tensor) -> Tensor:
    """Return the tensor in float32 if it has a type of 16 bits, in which sums and scaled losses lose digits."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor

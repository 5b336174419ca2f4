"""The precision of a model: the dtype of its tensors, what its forward passes are computed in, and what is gathered.

Where a divided model runs under autocast, what autocast would cast is cast before it is gathered. Otherwise autograd
keeps the casts of all parameters from the forward to the backward pass: a copy of the whole model on each rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from orchestrator.compat.modules import own_parameters
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


_CAST = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that autocast casts."""
_UNCAST = (nn.LayerNorm, nn.RMSNorm, nn.EmbeddingBag, nn.Bilinear, ParametrizationList)
"""Modules whose parameters autocast uses as they are. Some refuse inputs of another dtype."""


def gathered_dtypes(model: nn.Module, autocast_dtype: torch.dtype | None) -> dict[Tensor, torch.dtype]:
    """Return the dtype in which the parts of each parameter are gathered.

    Biases and the scales of norms have a single dimension. They keep their dtype, as all parameters without autocast.

    Args:
        model: the model, or modules of it; its tensors may be fake.
        autocast_dtype: what autocast computes in; None for no autocast.
    """
    found: dict[Tensor, torch.dtype] = {}
    for module in model.modules():
        for parameter in own_parameters(module).values():
            if parameter is None:
                continue
            is_cast = parameter.ndim > 1 and parameter.dtype in _CAST and not isinstance(module, _UNCAST)
            if autocast_dtype is None or not is_cast:
                found[parameter] = parameter.dtype
            else:
                found.setdefault(parameter, autocast_dtype)
    return found


def gathered_share(model: nn.Module, autocast_dtype: torch.dtype | None) -> float:
    """Return the bytes that are gathered of each byte of the parameters; see :func:`gathered_dtypes`."""
    dtypes = gathered_dtypes(model, autocast_dtype)
    gathered = sum(p.numel() * dtype.itemsize for p, dtype in dtypes.items())
    return gathered / max(1, sum(p.nbytes for p in dtypes))


def keep_embedded_dtype(model: nn.Module) -> None:
    """Let embeddings return rows in the dtype that their parameters have now, whatever they are gathered in.

    Autocast leaves embeddings alone, so that what the blocks of a transformer add to them is summed in float32.
    """
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.register_forward_hook(_Convert(module.weight.dtype))


class _Convert:
    def __init__(self, dtype: torch.dtype):
        self._dtype = dtype

    def __call__(self, module: nn.Module, args: Any, rows: Tensor) -> Tensor:
        return rows.to(self._dtype)

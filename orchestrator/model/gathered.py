"""The dtypes in which the parameters of a divided model are gathered, where its passes run under autocast.

What autocast would cast is cast before it is gathered. Otherwise autograd keeps the casts of all parameters from the
forward to the backward pass, which is a copy of the whole model on each rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from orchestrator.compat.torch import own_parameters

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

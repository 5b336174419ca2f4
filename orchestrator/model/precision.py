"""The precision of a model: the dtype of its tensors, what its forward passes are computed in, and what is gathered.

Where a divided model runs under autocast, what autocast would cast is cast before it is gathered. Otherwise autograd
keeps the casts of all parameters from the forward to the backward pass: a copy of the whole model on each rank. What
autocast does to a parameter is seen in a pass, because it depends on the operations, and not on the shape.
"""

from __future__ import annotations

import contextlib
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.compat.autocast import CAST_DTYPES, cast_grouped_products
from orchestrator.compat.modules import own_parameters
from orchestrator.compat.torch import CAST, CLONE, reads_nothing, storage_key
from orchestrator.model.batch import map_tensors, tensors_in

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
        if dtype is not None:
            cast_grouped_products(self.device_type)
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


_UNCAST = (nn.Embedding, nn.EmbeddingBag, nn.Bilinear, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)
"""Modules of torch whose parameters autocast uses as they are."""


class Casts:
    """What autocast does to the parameters of a model, as the operations show that a dispatch mode passes on.

    Attributes:
        seen: for each parameter that has been used, by each of its names, whether all uses begin with a cast to the
            dtype of autocast, by itself or by the model.
    """

    def __init__(self, model: nn.Module, autocast_dtype: torch.dtype | None) -> None:
        self.seen: dict[str, bool] = {}
        self._dtype = autocast_dtype
        self._copies: list[Tensor] = []  # whose storages are no others as long as these are here
        self._names: defaultdict[int, list[str]] = defaultdict(list)
        if autocast_dtype is not None:
            for name, parameter in model.named_parameters(remove_duplicate=False):
                self._names[storage_key(parameter.untyped_storage())].append(name)

    def note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Take note of an operation of a forward pass."""
        if not self._names or reads_nothing(func):
            return
        casts = func is CAST and kwargs.get("dtype") == self._dtype
        for tensor in tensors_in((args, kwargs)):
            names = self._names.get(storage_key(tensor.untyped_storage()), [])
            if names and func is CLONE:  # of which the use is still to come
                self._copies.append(result)
                self._names[storage_key(result.untyped_storage())] = names
                continue
            for name in names:
                self.seen[name] = self.seen.get(name, True) and casts and tensor.dtype in CAST_DTYPES


def gathered_dtypes(
    model: nn.Module, autocast_dtype: torch.dtype | None, seen: Mapping[str, bool] = MappingProxyType({})
) -> dict[str, torch.dtype]:
    """Return the dtype in which the parts of each parameter are gathered, by each of its names.

    What autocast casts in every use is cast before. All others keep their dtype, as all do without autocast.

    Args:
        model: the model; its tensors may be fake.
        autocast_dtype: what autocast computes in; None for no autocast.
        seen: as in :class:`Casts`. What has not been seen is used as the same parameter of a module that is alike, such
            as another block. Of the rest, those of torch's own modules are known.
    """
    owners = {
        f"{prefix}.{name}" if prefix else name: (module, parameter)
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name, parameter in own_parameters(module).items()
        if parameter is not None
    }
    alike: dict[Any, bool] = {}
    for name, casts in seen.items():
        if name in owners:
            key = _likeness(name, owners[name][0])
            alike[key] = alike.get(key, True) and casts
    cast: dict[Tensor, bool] = {}
    for name, (module, parameter) in owners.items():
        casts = seen.get(name, alike.get(_likeness(name, module), _is_cast_by_torch(module, parameter)))
        cast[parameter] = cast.get(parameter, True) and casts
    return {
        name: autocast_dtype if autocast_dtype is not None and cast[p] and p.dtype in CAST_DTYPES else p.dtype
        for name, (_, p) in owners.items()
    }


def _likeness(name: str, owner: nn.Module) -> tuple[str, type[nn.Module]]:
    return re.sub(r"\d+", "*", name), type(owner)


def _is_cast_by_torch(module: nn.Module, parameter: Tensor) -> bool:
    """Return whether a module of torch gives a parameter to an operation that autocast casts for."""
    is_own = str(getattr(type(module).forward, "__module__", "")).startswith("torch.nn.modules.")
    return is_own and parameter.ndim > 1 and not isinstance(module, _UNCAST)


def gathered_share(
    model: nn.Module, autocast_dtype: torch.dtype | None, seen: Mapping[str, bool] = MappingProxyType({})
) -> float:
    """Return the bytes that are gathered of each byte of the parameters; see :func:`gathered_dtypes`."""
    dtypes = gathered_dtypes(model, autocast_dtype, seen)
    named = dict(model.named_parameters())
    gathered = sum(parameter.numel() * dtypes[name].itemsize for name, parameter in named.items())
    return gathered / max(1, sum(parameter.nbytes for parameter in named.values()))

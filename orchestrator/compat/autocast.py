"""What autocast of torch leaves out: the products of experts, which it computes in float32 (pytorch#174763)."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

_CAST = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that autocast casts."""
_LIBRARY = torch.library.Library("aten", "IMPL")


@functools.cache
def cast_grouped_products(device_type: str) -> None:
    """Let autocast on a type of devices cast what ``torch.nn.functional.grouped_mm`` multiplies, as other products.

    It holds in the whole process, and does nothing where torch does so itself.
    """
    key = f"Autocast{device_type.upper()}"
    if torch._C._dispatch_has_kernel_for_dispatch_key("aten::_grouped_mm", key):
        return
    without = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def multiply(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype(device_type)

        def cast(value: Any) -> Any:
            return value.to(dtype) if isinstance(value, Tensor) and value.dtype in _CAST else value

        with torch._C._ExcludeDispatchKeyGuard(without):
            return torch._grouped_mm(*map(cast, args), **{name: cast(value) for name, value in kwargs.items()})

    _LIBRARY.impl("_grouped_mm", multiply, key)

"""Autocast of torch: for which devices, and of the products of experts, which it computes in float32."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

CAST_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that autocast casts."""
_LIBRARY = torch.library.Library("aten", "IMPL")


@functools.cache
def cast_grouped_products(device_type: str) -> None:
    """Let autocast on a type of devices cast what ``torch.nn.functional.grouped_mm`` multiplies, as other products.

    It holds in the whole process, and does nothing where torch does so itself (pytorch#174763).
    """
    key = f"Autocast{device_type.upper()}"
    if torch._C._dispatch_has_kernel_for_dispatch_key("aten::_grouped_mm", key):
        return
    without = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def multiply(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype(device_type)

        def cast(value: Any) -> Any:
            return value.to(dtype) if isinstance(value, Tensor) and value.dtype in CAST_DTYPES else value

        with torch._C._ExcludeDispatchKeyGuard(without):
            return torch._grouped_mm(*map(cast, args), **{name: cast(value) for name, value in kwargs.items()})

    _LIBRARY.impl("_grouped_mm", multiply, key)


@contextlib.contextmanager
def autocast_of(device_type: str) -> Iterator[None]:
    """Let contexts of autocast that are made in the block be for ``device_type``, whatever type the code names."""
    contexts: Any = torch.autocast
    original = contexts.__init__

    @functools.wraps(original)
    def init(self: Any, _: str, *args: Any, **kwargs: Any) -> None:
        original(self, device_type, *args, **kwargs)

    contexts.__init__ = init
    try:
        yield
    finally:
        contexts.__init__ = original

"""The kernels of attention that GPUs have, for passes with fake tensors on a machine without them; and masks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

FUSED = {
    torch.ops.aten._scaled_dot_product_flash_attention: 4,
    torch.ops.aten._scaled_dot_product_efficient_attention: 6,
}
"""The operators, and the place of ``is_causal`` among their arguments. A causal one computes half of the square."""


def causal_to_the_end(queries: int, keys: int) -> Tensor:
    """Return the mask for the last ``queries`` of ``keys`` tokens that each see those before it, without its memory.

    It is made outside of dispatch modes, such as counters of operations, in which torch refuses such tensors.
    """
    from torch.nn.attention.bias import causal_lower_right  # which imports torch._dynamo

    with _disable_current_modes():
        return causal_lower_right(queries, keys)


class FusedAttention(TorchFunctionMode):
    """Lets ``scaled_dot_product_attention`` keep what it keeps on a GPU, where no square of positions is stored."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        return _attention(*args, **kwargs)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if enable_gqa:
        copies = query.shape[-3] // key.shape[-3]
        key, value = (t.repeat_interleave(copies, -3) for t in (key, value))
    flash, efficient = FUSED
    if attn_mask is None:
        out: Tensor = flash(query, key, value, dropout_p, is_causal)[0]
        return out
    bias = torch.zeros_like(attn_mask, dtype=query.dtype).expand(*query.shape[:-1], key.shape[-2])
    masked: Tensor = efficient(query, key, value, bias, True, dropout_p, is_causal)[0]
    return masked

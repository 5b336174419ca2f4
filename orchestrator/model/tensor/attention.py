"""``nn.MultiheadAttention`` of which a rank has some of the heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from orchestrator.model.peers import Peers


def has_divisible_heads(module: nn.Module) -> bool:
    """Return whether a module is an attention of torch with one projection of queries, keys and values."""
    return (
        isinstance(module, nn.MultiheadAttention)
        and type(module).forward in (nn.MultiheadAttention.forward, DividedHeads.forward)
        and module.in_proj_weight is not None
        and module.bias_k is None
        and not module.add_zero_attn
    )


class DividedHeads(nn.MultiheadAttention):
    """Some of the heads. The class of an attention becomes this one.

    Attributes:
        index, peers: the number of the rank, and those that have the other heads.
        enter: takes what all ranks have alike into the region.
        leave: sums over the ranks.
    """

    index: int
    peers: Peers
    enter: Callable[[Tensor], Tensor]
    leave: Callable[[Tensor], Tensor]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute as torch does, but for ``is_causal``, with which torch asks for the mask too."""
        batched, swapped = query.ndim == 3, not self.batch_first and query.ndim == 3
        given = [self.enter(x) for x in (query, key, value)]
        given = [x.transpose(0, 1) if swapped else x if batched else x[None] for x in given]
        biases = [None] * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        parts = zip(given, self.in_proj_weight.chunk(3), biases, strict=True)
        q, k, v = (F.linear(x, w, b).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for x, w, b in parts)
        mask = self._mask(attn_mask, key_padding_mask, q)
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = q @ k.transpose(-1, -2) * self.head_dim**-0.5
            own = F.dropout((scores if mask is None else scores + mask).softmax(-1), dropout)
            weights, mixed = self._weights(own, average=average_attn_weights), own @ v
            weights = weights if batched else weights[0]
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout)
        out = self.leave(F.linear(mixed.transpose(1, 2).flatten(2), self.out_proj.weight))
        out = out if self.out_proj.bias is None else out + self.out_proj.bias
        return (out.transpose(0, 1) if swapped else out if batched else out[0]), weights

    def _mask(self, attention: Tensor | None, padding: Tensor | None, q: Tensor) -> Tensor | None:
        """Return what is added to the scores of the own heads."""
        masks = []
        if attention is not None:
            if attention.ndim == 3:
                every = attention.unflatten(0, (len(q), -1))
                attention = every.narrow(1, self.index * q.shape[1], q.shape[1])
            masks.append(attention)
        if padding is not None:
            masks.append(padding[:, None, None] if padding.ndim == 2 else padding[None, None, None])
        added = [_added(mask, q.dtype) for mask in masks]
        return sum(added[1:], added[0]) if added else None

    def _weights(self, own: Tensor, *, average: bool) -> Tensor:
        count = self.num_heads // own.shape[1]
        if not average:
            return self.peers.gather(own.detach(), count, axis=1)
        summed: Tensor = self.leave(own.sum(1))
        mean: Tensor = summed / self.num_heads
        return mean


def divide_heads(attention: nn.Module, *, index: int, region: Any) -> None:
    """Let an attention whose weights have been cut compute with them."""
    attention.__class__ = DividedHeads
    assert isinstance(attention, DividedHeads)
    attention.index, attention.peers = index, region.peers
    attention.enter, attention.leave = region.enter, region.leave
    attention.register_forward_pre_hook(lambda module, args: None)  # without which torch's layers call no modules


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, float("-inf"))

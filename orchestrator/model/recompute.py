"""Activation checkpointing: blocks whose forward pass runs again in the backward pass, instead of keeping activations.

Chen et al., 2016, "Training Deep Nets with Sublinear Memory Cost". Selective: Korthikanti et al., MLSys 2023, "Reducing
Activation Recomputation in Large Transformer Models".
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from orchestrator.model.buffers import ReplacedBuffers

Selection = Literal["none", "blocks", "selective"]
"""What is computed again: nothing, the blocks, or the blocks without their matrix products and convolutions."""

_KEPT = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten.baddbmm.default,
        torch.ops.aten.convolution.default,
    }
)
"""The operators whose results ``selective`` keeps. None of them is random: one that is left out of the recomputation
would let those after it draw other numbers."""

_thread = threading.local()


def recomputed(run: Callable[..., Any], *args: Any, block: nn.Module, selective: bool) -> Any:
    """Return ``run(*args)``, and let the backward pass call ``run`` again.

    Args:
        run: the forward pass of ``block``.
        args: its inputs, which are kept.
        block: the module whose buffers the second call must not change.
        selective: whether the results of matrix products and convolutions are kept too.
    """

    def contexts() -> tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]:
        if not selective:
            return contextlib.nullcontext(), _Recomputation(block)
        keeping, using = create_selective_checkpoint_contexts(_policy)
        return keeping, _both(_Recomputation(block), using)

    return checkpoint(run, *args, use_reentrant=False, context_fn=contexts)


def is_recomputing() -> bool:
    """Return whether this thread computes a forward pass again, in a backward pass."""
    return getattr(_thread, "recomputing", False)


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


@contextlib.contextmanager
def _both(
    outer: contextlib.AbstractContextManager[Any], inner: contextlib.AbstractContextManager[Any]
) -> Iterator[None]:
    with outer, inner:
        yield


class _Recomputation(ReplacedBuffers):
    """Lets a forward pass change copies of a block's buffers, because running statistics count a batch once.

    A backward pass in halves has two recomputations.
    """

    def __init__(self, block: nn.Module):
        super().__init__(block, Tensor.clone)

    def __enter__(self) -> None:
        super().__enter__()
        _thread.recomputing = True

    def __exit__(self, *error: object) -> None:
        _thread.recomputing = False
        super().__exit__(*error)

"""Forward passes with fake tensors, also through modules that need values."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.compat.torch import (
    FakeTensor,
    FakeTensorMode,
    pytree,
    unset_fake_temporarily,
    without_fake_tensor_logs,
)
from orchestrator.model.partial_init import FakeModel
from orchestrator.model.recorder import fake_like
from orchestrator.model.tensor_slots import filled, random_like


@dataclass
class RealCalls:
    """``active``: whether a module is being called again, with real tensors."""

    active: bool = False


@contextlib.contextmanager
def fake_calls(whole: FakeModel, *, opened: Collection[nn.Module] = ()) -> Iterator[RealCalls]:
    """Let modules that fail with fake tensors be called with random real ones, for the shapes of their results.

    Such modules use operators that fake tensors lack, or branch on the values of tensors. One of them at a time has
    memory. The random generators are left unchanged.

    Args:
        whole: the model.
        opened: modules that raise their error instead, because their own operations are wanted.

    Raises:
        Exception: whatever a module raises with real tensors too.
    """
    original = nn.Module.__call__
    real_calls = RealCalls()

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(module, *args, **kwargs)
        except ValueError:
            raise
        except Exception:
            if module in opened or not any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves((args, kwargs))):
                raise
            return _call_real(module, args, kwargs, whole.mode)

    def _call_real(module: nn.Module, args: Any, kwargs: Any, mode: FakeTensorMode) -> Any:
        with unset_fake_temporarily(), torch.random.fork_rng(devices=[]), filled(module, random_like):
            was_active, real_calls.active = real_calls.active, True
            try:
                real_args, real_kwargs = pytree.tree_map_only(FakeTensor, random_like, (args, kwargs))
                out = original(module, *real_args, **real_kwargs)
            finally:
                real_calls.active = was_active
        return pytree.tree_map_only(Tensor, lambda t: fake_like(t, mode).requires_grad_(t.requires_grad), out)

    nn.Module.__call__ = call  # type: ignore[method-assign]
    try:
        with without_fake_tensor_logs():
            yield real_calls
    finally:
        nn.Module.__call__ = original  # type: ignore[method-assign]

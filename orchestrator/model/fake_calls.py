"""Forward passes with fake tensors, also through modules that need values."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from orchestrator.compat.generators import kept_generators
from orchestrator.compat.torch import (
    FakeTensor,
    calls_through,
    unset_fake_temporarily,
    without_fake_tensor_logs,
)
from orchestrator.model.batch import map_tensors, tensors_in
from orchestrator.model.partial_init import FakeModel
from orchestrator.model.tensor_slots import filled, random_like


@dataclass
class RealCalls:
    """The calls of modules again, with real tensors.

    Attributes:
        active: whether such a call is in progress.
    """

    active: bool = False


@contextlib.contextmanager
def fake_calls(whole: FakeModel, *, opened: Collection[nn.Module] = ()) -> Iterator[RealCalls]:
    """Let modules that fail with fake tensors be called with real ones, for the shapes of their results.

    These are random, but for the inputs of the model.

    Such modules use operators that fake tensors lack, or branch on the values of tensors. One of them at a time has
    memory. The random generators are left unchanged.

    Args:
        whole: the model.
        opened: modules that raise their error instead, because their own operations are wanted.

    Raises:
        Exception: whatever a module raises with real tensors too.
    """
    real_calls = RealCalls()

    def call(original: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(module, *args, **kwargs)
        except ValueError:
            raise
        except Exception:
            if module in opened or not any(isinstance(tensor, FakeTensor) for tensor in tensors_in((args, kwargs))):
                raise
            return call_real(original, module, args, kwargs)

    def real(tensor: Tensor) -> Tensor:
        return whole.real_input(tensor) if isinstance(tensor, FakeTensor) else tensor

    def call_real(original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        with unset_fake_temporarily(), kept_generators(), filled(module, random_like):
            was_active, real_calls.active = real_calls.active, True
            try:
                real_args, real_kwargs = map_tensors(real, (args, kwargs))
                out = original(module, *real_args, **real_kwargs)
            finally:
                real_calls.active = was_active
        return map_tensors(lambda t: whole.fake_like(t).requires_grad_(t.requires_grad), out)

    with calls_through(call), without_fake_tensor_logs():
        yield real_calls

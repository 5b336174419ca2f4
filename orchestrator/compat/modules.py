"""The private parts of modules of torch, and of ``DistributedDataParallel``. Checked with torch 2.11, 2.13 and 2.15."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

_NEVER = 2**30
"""A sampling rate, in steps, that no run reaches."""


# The dicts are the module's own: a change to them changes the module.


def has_backward_hooks(module: nn.Module) -> bool:
    """Return whether user code has set a hook on the gradients that flow through ``module``."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the parameters that are registered directly on ``module``, by attribute name."""
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the buffers that are registered directly on ``module``, by attribute name."""
    return module._buffers


def persistent_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the module's own buffers that its ``state_dict()`` has."""
    return {name: buffer for name, buffer in module._buffers.items() if name not in module._non_persistent_buffers_set}


def has_loading_code(model: nn.Module) -> bool:
    """Return whether ``load_state_dict()`` of a model runs code that is not of ``torch.nn``."""
    return any(
        module._load_state_dict_pre_hooks
        or module._load_state_dict_post_hooks
        or any(not method.__module__.startswith("torch.nn.") for method in _loading(type(module)))
        for module in model.modules()
    )


def _loading(kind: type[nn.Module]) -> list[Callable[..., Any]]:
    return [kind.load_state_dict, kind._load_from_state_dict, kind.set_extra_state]


def hooks_of(module: nn.Module) -> list[Callable[..., Any]]:
    """Return the hooks that a call of ``module`` itself runs, before or after its forward or backward pass."""
    before = (module._forward_pre_hooks, module._backward_pre_hooks)
    return [hook for hooks in (*before, module._forward_hooks, module._backward_hooks) for hook in hooks.values()]


def is_plain_sequential(module: nn.Module) -> bool:
    """Return whether a call of ``module``, and a change of its mode, is that of its children in turn and nothing else.

    Its class or the instance may override what a call runs.
    """
    names = ("__call__", "_call_impl", "forward", "__iter__", "train", "eval")
    functions = {name: getattr(getattr(module, name, None), "__func__", None) for name in names}
    return not hooks_of(module) and all(functions[name] is getattr(nn.Sequential, name) for name in names)


def own_children(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the direct children of ``module``, by attribute name; a shared child stands under each of its names."""
    return module._modules


def data_parallel_replica(module: nn.Module) -> nn.Module:
    """Return a copy of ``module`` as ``nn.DataParallel`` makes it: same buffers and children, no parameters."""
    replica: nn.Module = module._replicate_for_data_parallel()
    return replica


@contextlib.contextmanager
def calls_through(call: Callable[..., Any]) -> Iterator[None]:
    """Let ``call(original, module, *args, **kwargs)`` make every call of a module in the block.

    ``original(module, *args, **kwargs)`` is the call itself, hooks included.
    """
    original = nn.Module.__call__

    def call_through(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        return call(original, module, *args, **kwargs)

    nn.Module.__call__ = call_through  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = original  # type: ignore[method-assign]


def called_module(frame: FrameType) -> tuple[nn.Module, tuple[Any, Mapping[str, Any]]] | None:
    """Return the module that a frame calls, and the arguments of the call; None if the frame calls none."""
    if frame.f_code is not nn.Module._call_impl.__code__:
        return None
    known = frame.f_locals
    return known["self"], (known["args"], known["kwargs"])


# DistributedDataParallel


def without_buffer_broadcasts() -> dict[str, Any]:
    """Return the arguments with which DDP leaves the buffers alone in the forward pass."""
    arguments = inspect.signature(DistributedDataParallel).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in arguments else "broadcast_buffers"  # torch 2.11
    return {name: False}


def set_ddp_timing(replica: DistributedDataParallel, *, enabled: bool) -> None:
    """Have DDP time the next step or not. A timed step waits for the device, so time only steps that are logged."""
    replica._set_ddp_runtime_logging_sample_rate(1 if enabled else _NEVER)


def ddp_comm_ms(replica: DistributedDataParallel) -> float | None:
    """Return for how many ms the last timed step waited for its all-reduces; None if DDP has no measurement.

    Communication that overlaps with the backward pass is not counted.
    """
    assert replica.logger is not None
    replica.logger.set_runtime_stats_and_log()  # otherwise DDP updates its statistics in the next step
    times = replica._get_ddp_logging_data()
    total_ns = times.get("backward_comm_time", 0)
    if not total_ns:
        return None
    overlapped_ns = times.get("backward_compute_comm_overlap_time", 0)
    return float(max(total_ns - overlapped_ns, 0)) / 1e6


def release_ddp(replica: DistributedDataParallel) -> None:
    """Drop the parts of ``replica`` that own the process group. ``replica`` is unusable afterwards.

    As the last owner of the group, the reducer would wait for gloo's threads while it holds the interpreter lock, and
    these threads may be waiting for the lock.
    """
    del replica.reducer
    del replica.logger

"""Calls of the user's methods that may look at the training but must not change it: callbacks, and ``job.sample``."""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn

from orchestrator.compat.generators import kept_generators
from orchestrator.compat.modules import own_buffers, own_parameters
from orchestrator.compat.torch import version_of
from orchestrator.user_code.errors import place_of, user_frames

Returned = TypeVar("Returned")


class ModelChangedError(RuntimeError):
    """A method that may only look at the model has changed it."""


def call_without_effect(
    call: Callable[[], Returned], *, method: str, model: nn.Module | None, device: torch.device
) -> Returned:
    """Return what ``call()`` returns, and leave the training as it was.

    Gradients are not recorded. The random generators and the modes of the modules are restored afterwards.

    Args:
        call: calls the method.
        method: the method, such as ``job.sample``, for the message.
        model: the model that it may look at; None if it has none.
        device: the device of the model.

    Raises:
        ModelChangedError: a parameter or a buffer was changed.
        Exception: whatever ``call`` raises.
    """
    modes = [] if model is None else [(module, module.training) for module in model.modules()]
    before = _versions(model)
    try:
        with kept_generators(device), torch.no_grad():
            return call()
    finally:
        for module, training in modes:
            module.training = training
        if (changed := _first_change(before, model)) is not None:
            remedy = "look at a copy of it"
            if changed.startswith("the buffer"):
                remedy += "; a forward pass in training mode changes buffers, so call model.eval() before one"
            raise ModelChangedError(
                f"{method} changed {changed}; it runs on one rank only, so the ranks would train different models. "
                f"Change the model in Job.training_step, or {remedy}"
            )


def error_with_place(error: Exception) -> str:
    """Return the last line of the error's traceback, and the place in the user's code where it was raised."""
    text = "".join(traceback.format_exception_only(error)).strip().splitlines()[0]
    frames = user_frames(error)
    return f"{text} ({place_of(frames[-1])}, in {frames[-1].tb_frame.f_code.co_name})" if frames else text


TensorVersion = tuple[int, int, bool]
"""The version, the address and ``requires_grad`` of a tensor."""


def _versions(model: nn.Module | None) -> dict[Tensor, TensorVersion]:
    """Return what identifies the present state of every parameter and buffer, without reading its values."""
    return {
        tensor: (version_of(tensor), tensor.data_ptr() if tensor.layout == torch.strided else 0, tensor.requires_grad)
        for module in ([] if model is None else model.modules())
        for tensor in (*own_parameters(module).values(), *own_buffers(module).values())
        if tensor is not None
    }


def _first_change(before: Mapping[Tensor, TensorVersion], model: nn.Module | None) -> str | None:
    """Return what has changed in the model; None if nothing has."""
    after = _versions(model)
    if model is None or before == after:
        return None
    parameters = ((f"the parameter {name}", p) for name, p in model.named_parameters())
    buffers = ((f"the buffer {name}", b) for name, b in model.named_buffers())
    changed = (name for name, t in itertools.chain(parameters, buffers) if before.get(t) != after[t])
    return next(changed, "the set of parameters and buffers")

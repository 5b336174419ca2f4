"""Hooks on gradients, which run once for each part of a batch: whether the sum of their results is that of the batch.

A hook that scales or masks a gradient is linear, and one that reads it changes nothing. Clipping and normalising are
neither.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from orchestrator.compat.generators import kept_generators, seed_generators
from orchestrator.compat.modules import has_backward_hooks
from orchestrator.compat.torch import FakeTensor, has_gradient_hooks
from orchestrator.config.text import first_few
from orchestrator.planning.plan import Plan
from orchestrator.user_code.errors import JobError

SCALES = (1e-6, 1e-3, 1.0, 1e3)
"""The sizes of the elements of the gradients that are tried, because a limit shows only above or below it."""
TOLERANCE = 1e-4


def check_gradient_hooks(
    parameters: Iterable[tuple[str, nn.Parameter]], *, by: str, replicas: bool, in_turn: bool
) -> None:
    """Call the gradient hooks of parameters with random gradients, and compare the sum of two parts with the whole.

    Parameters that have no hook are not touched.

    Args:
        parameters: the parameters by name, on the device and without gradients.
        by: what divides the batch, as typed on the command line.
        replicas: whether the gradients of several parts are summed after hooks have run.
        in_turn: whether the gradient of a part is added to those of the parts before it, which hooks have changed.

    Raises:
        JobError: a hook makes another gradient of parts, or cannot run; the text says what to do.
    """
    ways = [way for way, used in ((False, replicas), (True, in_turn)) if used]
    hooked = {name: p for name, p in parameters if ways and p.requires_grad and has_gradient_hooks(p)}
    if fake := [name for name, p in hooked.items() if isinstance(_gradient(p, [torch.zeros_like(p)]), FakeTensor)]:
        raise JobError(
            f"{by}: the gradient hook of {first_few(fake, 2)} uses a tensor that has no values where a part of the "
            "model is built; make it a buffer of the module and read it from there, or use strategy=ddp"
        )
    differing = [
        name
        for name, parameter in hooked.items()
        if any(_depends(parameter, scale, in_turn=way) for way in ways for scale in SCALES)
    ]
    if differing:
        raise JobError(
            f"{by}: the gradient hook of {first_few(differing, 2)} would run on the gradients of parts of the batch, "
            "and their sum would differ from what it makes of the gradient of the whole batch. Clip with "
            "train.clip_norm or train.clip_value, change gradients in step() of the optimizer that Job.optimizer "
            "returns, or use strategy=single train.grad_accumulation=1"
        )


def backward_hooks_note(model: nn.Module, plan: Plan) -> str | None:
    """Return a note on modules with backward hooks, whose gradients nobody can try before training."""
    parts = plan.mesh.data_parallel_size * plan.devices_per_worker * plan.grad_accumulation
    hooked = [name or "the model" for name, module in model.named_modules() if has_backward_hooks(module)]
    if not hooked or parts * (plan.pipeline.num_microbatches if plan.pipeline is not None else 1) == 1:
        return None
    return (
        f"the backward hooks of {first_few(hooked, 2)} get the gradients of a part of the batch, which strategy=ddp "
        "also multiplies by the number of workers; if they do more than scale or read them, such as clipping, the run "
        "trains otherwise than strategy=single train.grad_accumulation=1"
    )


def _depends(parameter: nn.Parameter, scale: float, *, in_turn: bool) -> bool:
    """Return whether hooks make another gradient of two parts than of their sum, or change the parameter."""
    before = parameter.detach().clone()
    with kept_generators(parameter.device):
        seed_generators(0)
        first, second = (torch.randn_like(before) * scale for _ in range(2))
        # Opposite signs show a limit in a tensor of any size; other directions show a choice among its elements.
        return any(
            _differs(parameter, parts, in_turn=in_turn) for parts in ((first, first / -2), (first, second))
        ) or not torch.equal(parameter, before)


def _differs(parameter: nn.Parameter, parts: Sequence[Tensor], *, in_turn: bool) -> bool:
    whole = _gradient(parameter, [torch.stack([*parts]).sum(0)])
    summed = [_gradient(parameter, group) for group in ([parts] if in_turn else [[part] for part in parts])]
    of_parts = [gradient for gradient in summed if gradient is not None]
    if whole is None or len(of_parts) < len(summed):
        return True
    tolerance = max(TOLERANCE, 4 * torch.finfo(whole.dtype).eps) * float(whole.abs().max())
    return not torch.allclose(torch.stack(of_parts).sum(0), whole, rtol=0, atol=tolerance, equal_nan=True)


def _gradient(parameter: nn.Parameter, parts: Sequence[Tensor]) -> Tensor | None:
    """Return the gradient that hooks leave after backward passes of the parts; None if they take it away."""
    for part in parts:
        parameter.backward(part.clone())
    gradient, parameter.grad = parameter.grad, None
    return gradient

"""Whether the pieces of a model train as the whole model does: compared on one micro-batch, before training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from orchestrator.model.precision import Precision
from orchestrator.model.sequence import LayerSequence

PASSES = 2
"""Forward and backward passes that are compared; the second one shows what the first has left in the modules."""
RTOL = 1e-4
ATOL = 1e-6


def parity_error(
    build: Callable[[], nn.Module],
    sequence: LayerSequence,
    inputs: Any,
    loss: Callable[[Any], Tensor],
    *,
    device: torch.device,
    seed: int,
    precision: Precision,
) -> str | None:
    """Compare loss, gradients and buffers of the pieces with those of the whole model.

    Needs memory for two copies of the model with their gradients.

    Args:
        build: the model's constructor.
        sequence: its pieces.
        inputs: a micro-batch on ``device``.
        loss: the loss of the model's output for that micro-batch.
        device: where to compute.
        seed: the seed before the constructor runs.
        precision: what the forward passes are computed in.

    Returns:
        What differs and in which module; None if nothing does.
    """
    generator_state = torch.random.get_rng_state()
    try:
        torch.manual_seed(seed)
        whole = build().to(device)
        layers = sequence.build_layers(build, range(len(sequence.names)), seed=seed)
        pieces = nn.Sequential(*(layers[index] for index in range(len(sequence.names)))).to(device)
        parts: dict[str, Tensor] = {}
        for index in range(len(sequence.names)):
            parts |= sequence.tensors_of(index, layers[index])
        for number in range(PASSES):
            losses = []
            for model in (whole, pieces):
                torch.manual_seed(seed + number)
                with precision.autocast():
                    value = loss(model(inputs))
                if value.requires_grad:
                    value.backward()
                losses.append(value.detach())
            if not _close(*losses):
                return f"the loss of the pieces is {float(losses[1]):g}, that of the whole model {float(losses[0]):g}"
            if (name := next(_different(dict(whole.named_parameters()), parts), None)) is not None:
                return f"the gradient of {name} differs from that of the whole model"
            if (name := next(_different_values(dict(whole.named_buffers()), parts), None)) is not None:
                return f"the forward pass leaves another value in the buffer {name} than that of the whole model"
        return None
    finally:
        torch.random.set_rng_state(generator_state)


def _different(parameters: Mapping[str, nn.Parameter], parts: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield the names of the parameters whose gradients differ, from the last to the first."""
    for name, parameter in reversed(list(parameters.items())):
        if name in parts and parameter.requires_grad and not _close(parameter.grad, parts[name].grad):
            yield name


def _different_values(buffers: Mapping[str, Tensor], parts: Mapping[str, Tensor]) -> Iterator[str]:
    for name, buffer in buffers.items():
        if name in parts and not _close(buffer, parts[name]):
            yield name


def _close(one: Tensor | None, other: Tensor | None) -> bool:
    """Compare two tensors, dense or sparse. A missing gradient equals one of zeros."""
    dense = [tensor.to_dense() if tensor.is_sparse else tensor for tensor in (one, other) if tensor is not None]
    if len(dense) < 2:
        return not any(bool(tensor.any()) for tensor in dense)
    return torch.allclose(dense[0], dense[1], rtol=RTOL, atol=ATOL, equal_nan=True)


def free_memory(device: torch.device) -> int:
    """Return the free memory of ``device`` in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)

"""The memory of the training state on a rank, tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from orchestrator.state.optimizers import AnyOptimizer

TensorKind = Literal["parameter", "buffer", "gradient", "optimizer state"]


@dataclass(frozen=True)
class TensorSize:
    """The size of a tensor, or of all optimizer state of a parameter.

    Attributes:
        name: the name of the parameter or buffer.
        device_type: where it is, such as ``cuda``. Parameters may be in host memory, and their state with them.
    """

    name: str
    kind: TensorKind
    size_bytes: int
    device_type: str


def sizes_of(module: nn.Module, optimizer: AnyOptimizer) -> Iterator[TensorSize]:
    """Yield the size of each tensor of ``module``, of its gradient, and of what ``optimizer`` keeps for it."""
    state = optimizer.state
    for name, buffer in module.named_buffers():
        yield TensorSize(name, "buffer", buffer.nbytes, buffer.device.type)
    for name, parameter in module.named_parameters():
        device_type = parameter.device.type
        yield TensorSize(name, "parameter", parameter.nbytes, device_type)
        if parameter.grad is not None:
            yield TensorSize(name, "gradient", parameter.grad.nbytes, device_type)
        if kept := sum(v.nbytes for v in state.get(parameter, {}).values() if isinstance(v, Tensor)):
            yield TensorSize(name, "optimizer state", kept, device_type)

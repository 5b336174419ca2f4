"""The floating-point operations of a model, without running it."""

from __future__ import annotations

from typing import Any

from orchestrator.compat.torch import TorchDispatchMode, flop_formula
from orchestrator.model.layers import flow
from orchestrator.model.precision import Precision
from orchestrator.model.sequence import LayerSequence


def forward_flops(sequence: LayerSequence, inputs: Any, *, precision: Precision) -> int:
    """Count the matrix products, convolutions and attention operators of a forward pass with fake tensors.

    Takes the arguments of :func:`~orchestrator.model.layers.flow`.
    """
    counter = _Counter()
    flow(sequence, inputs, precision=precision, observer=counter)
    return counter.flops


class _Counter(TorchDispatchMode):
    """Sums the operations of all operators that it sees."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if (formula := flop_formula(func)) is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=out)
        return out

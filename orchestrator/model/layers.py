"""The layers of a model at work: what flows between them, what each costs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from orchestrator.model.partial_init import places
from orchestrator.model.sequence import LayerSequence

MEASURED_RUNS = 3
MEASURED_S = 1.0
"""A layer is run ``MEASURED_RUNS`` times, or until it has taken this long."""

Precision = Callable[[], contextlib.AbstractContextManager[Any]]


def flow(sequence: LayerSequence, inputs: Any, *, precision: Precision) -> list[Any]:
    """What goes into each layer, and at the end what comes out of the last: fake tensors.

    ``inputs``: a batch as the model takes it, of real tensors on the outline's device.
    """
    values = [pytree.tree_map_only(Tensor, sequence.outline.like, inputs)]
    with sequence.outline.fake, precision():
        for layer in sequence.modules:
            values.append(layer(values[-1]))
    return values


def changing_buffers(sequence: LayerSequence, inputs: Any, *, precision: Precision) -> set[str]:
    """The names of persistent buffers that a forward pass in training changes, running statistics say."""

    def marks() -> dict[str, tuple[int, int]]:
        every = [sequence.tensors_of(i, module) for i, module in enumerate(sequence.modules)]
        return {name: (id(tensor), tensor._version) for tensors in every for name, tensor in tensors.items()}

    before = marks()
    flow(sequence, inputs, precision=precision)
    return {name for name, mark in marks().items() if before[name] != mark}


def costs(
    sequence: LayerSequence, values: Sequence[Any], inputs: Any, *, precision: Precision, loss: Callable[[Any], Tensor]
) -> list[float]:
    """Milliseconds of forward and backward of each layer; the last one with the loss.

    ``values`` are those of :func:`flow`. One layer at a time has memory, filled with small random numbers, and
    layers alike in all but their numbers are measured once. The sequence is used up.
    """
    known: dict[Any, float] = {}
    found = []
    for number, layer in enumerate(sequence.modules):
        last = number == len(sequence.modules) - 1
        tensors = (*pytree.tree_leaves(values[number]), *layer.parameters())
        kind = (repr(layer), last, *((t.shape, t.dtype) for t in tensors if isinstance(t, Tensor)))
        if kind not in known:
            value = inputs if number == 0 else pytree.tree_map_only(FakeTensor, _filled, values[number])
            own = list(places(layer))
            memory = {id(place.tensor): _filled(place.tensor) for place in own}
            for place in own:
                place.fill(memory)
            known[kind] = _cost(layer, value, precision, loss if last else _sum)
            layer.to("meta")
        found.append(known[kind])
    return found


def _cost(layer: nn.Module, value: Any, precision: Precision, loss: Callable[[Any], Tensor]) -> float:
    """The shortest of some runs, after one that warms up."""
    times: list[float] = []
    began = time.perf_counter()
    while len(times) <= MEASURED_RUNS and (len(times) < 2 or time.perf_counter() - began < MEASURED_S):
        _wait(value)
        start = time.perf_counter()
        with precision():
            out = loss(layer(value))
        if out.requires_grad:
            out.backward()
        _wait(value)
        times.append((time.perf_counter() - start) * 1e3)
    return min(times[1:])


def _sum(value: Any) -> Tensor:
    return torch.stack([t.float().sum() for t in pytree.tree_leaves(value) if isinstance(t, Tensor)]).sum()


def _wait(value: Any) -> None:
    for tensor in pytree.tree_leaves(value):
        if isinstance(tensor, Tensor) and tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)


def _filled(fake: Tensor) -> Tensor:
    real = torch.zeros(fake.shape, dtype=fake.dtype, device=fake.device)
    if real.is_floating_point():
        real.uniform_(0.01, 0.1)
    return real.requires_grad_(fake.requires_grad)

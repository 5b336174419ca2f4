"""Forward passes through the layers of a model: the values between them, and the cost and memory of each."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import saved_tensors_hooks

from orchestrator.compat.torch import CAST, TorchDispatchMode, storage_key, version_of, written_tensors
from orchestrator.model.batch import map_tensors, tensors_in
from orchestrator.model.fake_calls import fake_calls
from orchestrator.model.precision import Precision
from orchestrator.model.stages.sequence import LayerSequence
from orchestrator.model.tensor_slots import filled, random_like

MEASURED_RUNS = 3
MEASURED_S = 1.0
"""A layer is timed ``MEASURED_RUNS`` times, or until this many seconds have passed."""


def flow(
    sequence: LayerSequence,
    inputs: Any,
    *,
    precision: Precision,
    observer: contextlib.AbstractContextManager[object] | None = None,
) -> list[Any]:
    """Run a forward pass with fake tensors and return the input of each layer, then the output of the last one.

    Args:
        sequence: the layers, of fake tensors.
        inputs: a batch for the model, of real tensors on the device of the fake model.
        precision: what the forward pass is computed in.
        observer: entered around the forward pass, to see its operations; None for no observer.
    """
    values = [map_tensors(sequence.whole.fake_input, inputs)]
    with sequence.whole.mode, fake_calls(sequence.whole), precision.autocast(), observer or contextlib.nullcontext():
        for layer in sequence.modules:
            values.append(layer(values[-1]))
    return values


def changing_tensors(sequence: LayerSequence, inputs: Any, *, precision: Precision) -> set[str]:
    """Return the names of the parameters and persistent buffers that a forward pass in training changes.

    These are running statistics, for example, or the moving average of a layer. Takes the arguments of :func:`flow`.
    """

    def versions() -> dict[str, tuple[int, int, int]]:
        layers = [sequence.tensors_of(i, module) for i, module in enumerate(sequence.modules)]
        return {
            name: (id(tensor), version_of(tensor), storage_key(tensor.untyped_storage()))
            for tensors in layers
            for name, tensor in tensors.items()
        }

    before, writes = versions(), _Writes()
    flow(sequence, inputs, precision=precision, observer=writes)
    return {name for name, seen in versions().items() if before[name] != seen or seen[-1] in writes.storages}


class _Writes(TorchDispatchMode):
    """Collects the storages that operations change in place, also through ``Tensor.data``, which counts no version."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.storages |= {storage_key(t.untyped_storage()) for t in written_tensors(func, args, kwargs or {})}
        return func(*args, **(kwargs or {}))


def change_their_input(sequence: LayerSequence, layers: Iterable[int], value: Any, *, precision: Precision) -> bool:
    """Return whether some layers change what the first is called with in place, as ``nn.ReLU(inplace=True)`` does.

    A later one may do so: the first may return its input, or a view of it.

    Args:
        sequence: the layers, of fake tensors.
        layers: the indices of the layers, which follow one another.
        value: the input of the first, from the result of :func:`flow`.
        precision: what the forward pass is computed in.
    """
    fresh = map_tensors(sequence.whole.fake_input, value)
    before = [version_of(tensor) for tensor in tensors_in(fresh)]
    out = fresh
    with sequence.whole.mode, fake_calls(sequence.whole), precision.autocast():
        for index in layers:
            out = sequence.modules[index](out)
    return before != [version_of(tensor) for tensor in tensors_in(fresh)]


def costs(
    layers: Sequence[nn.Module],
    values: Sequence[Any],
    inputs: Any,
    *,
    precision: Precision,
    loss: Callable[[Any], Tensor],
) -> list[float]:
    """Measure the milliseconds of a forward and a backward pass of each layer; the last one includes the loss.

    One layer at a time gets memory, filled with small random numbers. Layers that differ only in the values of their
    parameters are measured once. A layer that replaces its buffers keeps the real ones.

    Args:
        layers: all layers of a model, of fake tensors.
        values: the result of :func:`flow`.
        inputs: a batch for the model, of real tensors.
        precision: what the forward pass is computed in.
        loss: the loss of the model's output.
    """
    known: dict[Any, float] = {}
    measured = []
    for index, layer in enumerate(layers):
        is_last = index == len(layers) - 1
        tensors = (*tensors_in(values[index]), *layer.parameters())
        kind = (repr(layer), is_last, *((t.shape, t.dtype) for t in tensors))
        if kind not in known:
            value = inputs if index == 0 else map_tensors(random_like, values[index])
            with filled(layer, random_like):
                known[kind] = _cost(layer, value, precision, loss if is_last else _sum)
        measured.append(known[kind])
    return measured


def _cost(layer: nn.Module, value: Any, precision: Precision, loss: Callable[[Any], Tensor]) -> float:
    """Return the fastest of several runs, after a warm-up run."""

    def run() -> float:
        fresh = map_tensors(torch.clone, value)  # the layer may change it in place, and a leaf cannot be changed
        began = _now(value)
        with precision.autocast():
            out = loss(layer(fresh))
        if out.requires_grad:
            out.backward()
        return (_now(value) - began) * 1e3

    run()
    times: list[float] = []
    began = time.perf_counter()
    while not times or (len(times) < MEASURED_RUNS and time.perf_counter() - began < MEASURED_S):
        times.append(run())
    return min(times)


def _sum(value: Any) -> Tensor:
    return torch.stack([t.float().sum() for t in tensors_in(value)]).sum()


def _now(value: Any) -> float:
    """Return the time in seconds at which the device of ``value`` has nothing left to do."""
    for tensor in tensors_in(value):
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)
    return time.perf_counter()


@dataclass
class Kept:
    """The sizes of what a forward pass has kept, in bytes; 0 during the pass.

    Attributes:
        activations: what it has computed, and inputs.
        casts: copies of parameters in another type, as autocast makes them: one of each in a pass, whatever the batch.
    """

    activations: int = 0
    casts: int = 0


@contextlib.contextmanager
def kept_tensors(model: nn.Module) -> Iterator[Kept]:
    """Count what the forward passes of a model in this context keep, of real or of fake tensors."""
    own = (*model.buffers(), *model.parameters())
    trained = {storage_key(tensor.untyped_storage()): tensor.requires_grad for tensor in own}
    saved: dict[int, int] = {}

    def save(tensor: Tensor) -> Tensor:
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            saved[storage_key(storage)] = storage.nbytes()
        return tensor.detach()

    kept, casts = Kept(), _Casts(trained)
    with saved_tensors_hooks(save, lambda tensor: tensor), casts:
        yield kept
    # autocast keeps the copies of trained parameters up to the end of a pass, those of others only the backward pass.
    copies = {key: copy.nbytes() for key, copy in casts.copies if trained[key] or storage_key(copy) in saved}
    kept.casts = sum(copies.values())
    others = trained.keys() | {storage_key(copy) for _, copy in casts.copies}
    kept.activations = sum(size for key, size in saved.items() if key not in others)


class _Casts(TorchDispatchMode):
    """Collects the copies in other types of the tensors with these keys: pairs of a key and its copy."""

    def __init__(self, keys: Container[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.copies: list[tuple[int, UntypedStorage]] = []
        self._keys = keys

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        is_copy = func is CAST and args[0].layout is torch.strided
        if is_copy and (key := storage_key(args[0].untyped_storage())) in self._keys:
            self.copies.append((key, out.untyped_storage()))
        return out

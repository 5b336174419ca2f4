"""Whether the pieces of a model train as the whole model does: compared on one micro-batch, before training."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from orchestrator.compat.generators import kept_generators, seed_generators
from orchestrator.compat.torch import FakeTensor
from orchestrator.model.batch import map_tensors
from orchestrator.model.partial_init import build_part
from orchestrator.model.precision import Precision
from orchestrator.model.sequence import LayerSequence
from orchestrator.model.streamed import NotStreamableError, Streamed
from orchestrator.model.tensor_slots import move, tensor_slots

PASSES = 2
"""Forward and backward passes that are compared; the second one shows what the first has left in the modules."""
RTOL = 1e-4
ATOL = 1e-6
COPIES = 4
"""The whole model and its pieces, each with gradients."""
STREAMED_COPIES = 3
"""The parameters of one layer, its gradients, and one tensor more."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of a comparison.

    Attributes:
        error: what differs and in which module; None if nothing does.
        note: what was not compared, and why; None if all was.
    """

    error: str | None = None
    note: str | None = None


def compare(
    build: Callable[[], nn.Module],
    sequence: LayerSequence,
    inputs: Any,
    loss: Callable[[Any], Tensor],
    *,
    device: torch.device,
    seed: int,
    precision: Precision,
    free_bytes: int,
    examine: Callable[[nn.Module], None] = lambda _: None,
) -> Verdict:
    """Compare the pieces of a model with the whole model, in training and in evaluation.

    Compares the losses in training and in evaluation and, after each of two backward passes, all gradients and buffers.

    With memory for two copies of the model and their gradients, both are compared with their initial values.

    Otherwise both run with memory for the parameters of one layer at a time
    (:class:`~orchestrator.model.streamed.Streamed`). Here, a layer is an outermost module that the pieces call as it
    is. Its parameters are random numbers, and its gradients are compared by norm and samples. Buffers, and parameters
    that are used between the layers, stay in memory, and so do the tensors that the layers receive for one micro-batch.
    What happens inside of a layer is not compared: both call the same one.

    A layer that changes what it is called with, or does not repeat its results, cannot be compared in this way.

    Args:
        build: the model's constructor.
        sequence: its pieces.
        inputs: a micro-batch on ``device``.
        loss: the loss of the model's output for that micro-batch.
        device: where to compute.
        seed: the seed before the constructor runs.
        precision: what the forward passes are computed in.
        free_bytes: the memory of ``device`` that may be used.
        examine: called with the whole model before its first pass, if there is memory for its initial values.
    """
    size = _bytes_of(sequence.whole.model.parameters())
    variants = _VariantBuilder(build=build, sequence=sequence, device=device, seed=seed, precision=precision)
    with kept_generators():
        if sequence.trains_as_the_whole:
            if size <= free_bytes:
                examine(variants.whole().module)
            return Verdict()
        needed = COPIES * size
        if needed <= free_bytes:
            whole = variants.whole()
            examine(whole.module)
            return Verdict(error=_difference(whole, variants.pieces(), inputs, loss, seed=seed))
        reason = f"two copies of the model with gradients need {needed / 1e9:.3g} GB of {free_bytes / 1e9:.3g} GB"
        if (streamed := _streamed_bytes(sequence)) > free_bytes:
            return Verdict(note=f"{_NOT_COMPARED}: {reason}, and its largest layer needs {streamed / 1e9:.3g} GB")
        try:
            error = _difference(variants.streamed(cut=False), variants.streamed(cut=True), inputs, loss, seed=seed)
        except Exception as e:  # a model may do anything that is impossible with one layer at a time
            why = " ".join(f"{type(e).__name__}: {e}".split())[:300]
            return Verdict(note=f"{_NOT_COMPARED}: {reason}, and layer by layer it is impossible ({why})")
        return Verdict(error=error, note=f"{_STREAMED}: {reason}")


_NOT_COMPARED = "the stages were not compared with the whole model"
_STREAMED = "the stages were compared with the whole model layer by layer and with random parameters"


def free_memory(device: torch.device) -> int:
    """Return the free memory of ``device`` in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


@dataclass(kw_only=True)
class _Variant:
    """The model whole or in pieces.

    Attributes:
        module: what is called with the inputs.
        tensors: its parameters and buffers that have memory, by the model's own names.
        precision: what its forward passes are computed in.
        streamed: the calls of its layers; None if all parameters have memory.
    """

    module: nn.Module
    tensors: Callable[[], Mapping[str, Tensor]]
    precision: Precision
    streamed: Streamed | None = None

    def train(self, inputs: Any, loss: Callable[[Any], Tensor]) -> Tensor:
        """Run a forward and a backward pass, and return the loss."""
        with self._calls():
            with self.precision.autocast():
                value = loss(self.module(inputs))
            if value.requires_grad:
                value.backward()
        return value.detach()

    @torch.no_grad()
    def evaluate(self, inputs: Any, loss: Callable[[Any], Tensor]) -> Tensor:
        """Return the loss in evaluation."""
        self.module.eval()
        with self._calls(), self.precision.autocast():
            return loss(self.module(inputs))

    def gradients(self) -> dict[tuple[int, str], Tensor | None]:
        """Return the gradients, or their digests, by the number of the call and the name of the parameter.

        The number is -1 for parameters that have memory all the time.
        """
        named = {name: t for name, t in self.tensors().items() if isinstance(t, nn.Parameter) and t.requires_grad}
        streamed = self.streamed.gradients if self.streamed else {}
        return {**{(-1, name): tensor.grad for name, tensor in named.items()}, **streamed}

    def buffers(self) -> dict[tuple[int, str], Tensor | None]:
        """Return the buffers under the keys of :meth:`gradients`."""
        return {(-1, name): t for name, t in self.tensors().items() if not isinstance(t, nn.Parameter)}

    def _calls(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.streamed is None else self.streamed.calls()


@dataclass(frozen=True, kw_only=True)
class _VariantBuilder:
    """Builds the variants of a model; for the attributes see :func:`compare`."""

    build: Callable[[], nn.Module]
    sequence: LayerSequence
    device: torch.device
    seed: int
    precision: Precision

    def whole(self) -> _Variant:
        """Return the whole model with its initial values."""
        seed_generators(self.seed)
        model = self.build().to(self.device)
        return _Variant(module=model, tensors=lambda: _named_tensors(model), precision=self.precision)

    def pieces(self) -> _Variant:
        """Return its pieces with their initial values."""
        layers = self.sequence.build_layers(self.build, range(len(self.sequence.names)), seed=self.seed)

        def tensors() -> dict[str, Tensor]:
            return {n: t for index, layer in layers.items() for n, t in self.sequence.tensors_of(index, layer).items()}

        return _Variant(module=_chain(layers).to(self.device), tensors=tensors, precision=self.precision)

    def streamed(self, *, cut: bool) -> _Variant:
        """Return the model, in pieces if ``cut``, with parameters that have memory only while their layer runs."""
        without_memory = _parameters_of_layers(self.sequence)
        model = build_part(self.build, lambda name: name not in without_memory, seed=self.seed)
        if self.device.type != "cpu":
            move([slot for slot in tensor_slots(model) if not isinstance(slot.tensor, FakeTensor)], self.device)
        return _Variant(
            module=_chain(self.sequence.of(model, range(len(self.sequence.names)))) if cut else model,
            tensors=lambda: {n: t for n, t in _named_tensors(model).items() if not isinstance(t, FakeTensor)},
            precision=self.precision,
            streamed=Streamed(model, self.sequence.leaves, device=self.device, precision=self.precision),
        )


def _chain(layers: Mapping[int, nn.Module]) -> nn.Module:
    return nn.Sequential(*(layers[index] for index in range(len(layers))))


def _named_tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict((*model.named_parameters(), *model.named_buffers()))


def _difference(
    whole: _Variant, pieces: _Variant, inputs: Any, loss: Callable[[Any], Tensor], *, seed: int
) -> str | None:
    """Return what differs first, and in which module; None if nothing does."""
    for number in range(PASSES):
        losses = []
        for variant in (whole, pieces):
            seed_generators(seed + number)
            losses.append(variant.train(map_tensors(torch.clone, inputs), loss))  # a model may change its batch
        if whole.streamed is not None and not losses[0].isfinite():
            raise NotStreamableError("with random parameters, the loss is not finite")
        if not _close(*losses):
            hint = _first_different_call(whole.streamed, pieces.streamed)
            return f"the loss of the pieces is {float(losses[1]):g}, that of the whole model {float(losses[0]):g}{hint}"
        if (name := _first_different(whole.gradients(), pieces.gradients(), backwards=True)) is not None:
            return f"the gradient of {name[1]} differs from that of the whole model"
        if (name := _first_different(whole.buffers(), pieces.buffers())) is not None:
            return f"the forward pass leaves another value in the buffer {name[1]} than that of the whole model"
    losses = []
    for variant in (whole, pieces):
        seed_generators(seed)
        losses.append(variant.evaluate(map_tensors(torch.clone, inputs), loss))
    if not _close(*losses):
        values = f"{float(losses[1]):g}, that of the whole model {float(losses[0]):g}"
        return f"in evaluation, the loss of the pieces is {values}"
    return None


def _first_different_call(whole: Streamed | None, pieces: Streamed | None) -> str:
    """Return which layer first receives other values; empty if it is not known."""
    if whole is None or pieces is None:
        return ""
    for (name, received), (called, given) in zip(whole.received, pieces.received, strict=False):
        if name != called or len(received) != len(given) or not all(map(_close, received, given)):
            return f"; the first layer that is called with other values is {name}"
    return ""


def _first_different(
    whole: Mapping[tuple[int, str], Tensor | None],
    pieces: Mapping[tuple[int, str], Tensor | None],
    *,
    backwards: bool = False,
) -> tuple[int, str] | None:
    """Return the first key, or the last one, whose tensors differ.

    Names of tensors that have memory all the time are left out if only one variant has them, because the two may know
    a shared tensor by different names.
    """
    in_both = whole.keys() & pieces.keys()
    keys = sorted((key for key in {**whole, **pieces} if key[0] >= 0 or key in in_both), key=lambda key: key[0])
    ordered = reversed(keys) if backwards else keys
    return next((key for key in ordered if not _close(whole.get(key), pieces.get(key))), None)


def _close(one: Tensor | None, other: Tensor | None) -> bool:
    """Compare two tensors, dense or sparse. A missing gradient equals one of zeros."""
    dense = [tensor.to_dense() if tensor.is_sparse else tensor for tensor in (one, other) if tensor is not None]
    if len(dense) < 2:
        return not any(bool(tensor.any()) for tensor in dense)
    if dense[0].shape != dense[1].shape:
        return False
    return torch.allclose(dense[0], dense[1], rtol=RTOL, atol=ATOL, equal_nan=True)


def _parameters_of_layers(sequence: LayerSequence) -> dict[str, Tensor]:
    """Return the parameters of the layers by name."""
    model = sequence.whole.model
    return {
        f"{leaf}.{slot.name}": slot.tensor
        for leaf in sequence.leaves
        for slot in tensor_slots(model.get_submodule(leaf))
        if isinstance(slot.tensor, nn.Parameter)
    }


def _streamed_bytes(sequence: LayerSequence) -> int:
    """Return about how much memory is needed with the parameters of one layer at a time."""
    model = sequence.whole.model
    without_memory = {id(tensor) for tensor in _parameters_of_layers(sequence).values()}
    tensors = {id(slot.tensor): slot.tensor for slot in tensor_slots(model)}
    kept = [tensor for key, tensor in tensors.items() if key not in without_memory]
    largest = max((_bytes_of(model.get_submodule(leaf).parameters()) for leaf in sequence.leaves), default=0)
    return COPIES * _bytes_of(kept) + STREAMED_COPIES * largest


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

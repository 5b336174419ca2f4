"""Forward and backward passes of a model with memory for the parameters of one layer at a time.

A call of a layer is one node of the autograd graph, as with activation checkpointing: its forward pass keeps only what
went in, and its backward pass runs the layer again. The parameters have memory only in these two calls. They are not
the initial values, which only the whole constructor could draw again, but random numbers that depend on the parameter's
name. Two variants of one model, such as the whole model and its pieces, therefore compute with the same values.
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from orchestrator.compat.torch import FakeTensor, calls_through, version_of
from orchestrator.model.batch import map_tensors, tensors_in
from orchestrator.model.precision import Precision
from orchestrator.model.tensor_slots import filled, tensor_slots

SAMPLES = 4096
"""Entries of a tensor that a digest keeps."""

TABLE = 65_521
"""Random numbers that are repeated to fill a tensor: a prime, so that no two rows are equal."""


class NotStreamableError(Exception):
    """A layer does something that a second call of it would not repeat; the text names it."""


def digest(tensor: Tensor) -> Tensor:
    """Return the 2-norm of a tensor and up to ``SAMPLES`` of its entries, evenly spaced, as float64 on the CPU."""
    flat = (tensor.to_dense() if tensor.is_sparse else tensor).detach().flatten()
    if flat.is_complex():
        flat = torch.view_as_real(flat).flatten()
    entries = flat[:: math.ceil(len(flat) / SAMPLES) or 1]
    as_float = flat if flat.is_floating_point() else flat.to(torch.float64)
    return torch.cat([torch.linalg.vector_norm(as_float, dtype=torch.float64).view(1), entries.double()]).cpu()


class Streamed:
    """The calls of some layers of a model, in the order in which they are made.

    Attributes:
        received: the layer of each call, and the digests of the tensors that it was called with.
        gradients: the digests of the parameters' gradients, by the number of the call and the name of the parameter.
    """

    def __init__(self, model: nn.Module, layers: Collection[str], *, device: torch.device, precision: Precision):
        """
        Args:
            model: the model; the parameters of the layers are fake tensors.
            layers: the names of the layers.
            device: where to compute.
            precision: what the forward passes are computed in.
        """
        self.received: list[tuple[str, list[Tensor]]] = []
        self.gradients: dict[tuple[int, str], Tensor] = {}
        self.precision = precision
        self.device = device
        self.inside = False
        self._layers = {model.get_submodule(name): name for name in layers}
        self._names = {id(slot.tensor): slot.name for slot in reversed(list(tensor_slots(model)))}

    @contextlib.contextmanager
    def calls(self) -> Iterator[None]:
        """Stream the calls of the layers that are made in the block."""

        def call(original: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if self.inside or module not in self._layers:
                return original(module, *args, **kwargs)
            return _Call(self, module, self._layers[module], original, (args, kwargs)).run()

        with calls_through(call):
            yield

    @contextlib.contextmanager
    def memory_for(self, module: nn.Module) -> Iterator[dict[str, Tensor]]:
        """Give the fake tensors of a module their values, which are yielded by name."""
        with filled(module, self._value) as values:
            was_inside, self.inside = self.inside, True
            try:
                yield {self._names[key]: value for key, value in values.items()}
            finally:
                self.inside = was_inside

    def _value(self, fake: FakeTensor) -> Tensor:
        """Return a value that depends on the name of the tensor alone, and keeps activations of ordinary size."""
        if not fake.is_floating_point():
            return torch.zeros(fake.shape, dtype=fake.dtype, device=self.device)
        # Repeated, because to draw every number would take longer than the passes.
        table = torch.randn(TABLE, generator=torch.Generator().manual_seed(zlib.crc32(self._names[id(fake)].encode())))
        if fake.ndim < 2:
            table = 1 + table.clamp(-2, 2) / 4
        else:
            table *= (len(fake) / max(1, fake.numel())) ** 0.5
        values = table.to(self.device, fake.dtype).repeat(fake.numel() // TABLE + 1)
        return values[: fake.numel()].view(fake.shape).requires_grad_(fake.requires_grad)


class _Call:
    """One call of a layer."""

    def __init__(self, streamed: Streamed, module: nn.Module, name: str, original: Callable[..., Any], arguments: Any):
        self.streamed, self.module, self.name, self.original = streamed, module, name, original
        self.arguments = arguments
        self.inputs = tensors_in(arguments)
        self.number = len(streamed.received)
        self.random = _random_state(streamed.device)
        self.result: Any = None  # only within run(), because it refers to the parameters
        streamed.received.append((name, [digest(tensor) for tensor in self.inputs]))

    def run(self) -> Any:
        """Return the result of the layer, connected to the autograd graph by one node."""
        if not torch.is_grad_enabled():
            with self.streamed.memory_for(self.module):
                return self.original(self.module, *self.arguments[0], **self.arguments[1])
        anchor = torch.zeros((), device=self.streamed.device, requires_grad=True)  # the inputs may need no gradient
        tensors = iter(_Node.apply(self, anchor, *self.inputs))  # type: ignore[no-untyped-call]
        result, self.result = self.result, None
        return map_tensors(lambda _: next(tensors), result)

    def again(self, inputs: Sequence[Tensor]) -> Any:
        """Call the layer with ``inputs`` in place of its tensors, and return its result.

        Raises:
            NotStreamableError: the layer changes an input in place.
        """
        with torch.enable_grad(), self.streamed.precision.autocast():
            own = [tensor.clone() for tensor in inputs]  # so that a change is allowed, and is found
            given = iter(own)
            args, kwargs = map_tensors(lambda _: next(given), self.arguments)
            result = self.original(self.module, *args, **kwargs)
        if any(map(version_of, own)):
            raise NotStreamableError(f"{self.name} changes what it is called with")
        return result


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, anchor: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call = call
        ctx.inputs = [tensor.detach().clone() for tensor in inputs]
        ctx.needs = [tensor.requires_grad for tensor in inputs]
        own = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in inputs]
        with call.streamed.memory_for(call.module):
            call.result = call.again(own)
        results = tensors_in(call.result)
        ctx.results = [tensor.requires_grad for tensor in results]
        detached = [tensor.detach() for tensor in results]
        ctx.mark_non_differentiable(*(t for t, needed in zip(detached, ctx.results, strict=True) if not needed))
        return tuple(detached)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        own = [tensor.requires_grad_(needed) for tensor, needed in zip(ctx.inputs, ctx.needs, strict=True)]
        with _random(call.random, call.streamed.device), call.streamed.memory_for(call.module) as values:
            results = tensors_in(call.again(own))
            if ctx.results != [tensor.requires_grad for tensor in results]:
                raise NotStreamableError(f"{call.name} returns something else when it is called again")
            pairs = [(t, g) for t, g in zip(results, gradients, strict=True) if g is not None and t.requires_grad]
            if pairs:
                torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
            for name, value in values.items():
                if value.grad is not None:
                    call.streamed.gradients[call.number, name] = digest(value.grad)
        return (None, None, *(tensor.grad for tensor in own))


def _random_state(device: torch.device) -> list[Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


@contextlib.contextmanager
def _random(state: list[Tensor], device: torch.device) -> Iterator[None]:
    """Draw random numbers from ``state``, and restore the generators afterwards."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.set_rng_state(state[0])
        if len(state) > 1:
            torch.cuda.set_rng_state(state[1], device)
        yield

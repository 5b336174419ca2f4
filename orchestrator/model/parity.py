"""Whether the pieces of a model train as the whole model does: compared on one micro-batch, before training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.compat.generators import kept_generators, seed_generators
from orchestrator.model.batch import map_tensors
from orchestrator.model.precision import Precision
from orchestrator.model.sequence import LayerSequence

PASSES = 2
"""Forward and backward passes that are compared; the second one shows what the first has left in the modules."""
RTOL = 1e-4
ATOL = 1e-6
COPIES = 4
"""The whole model and its pieces, each with gradients."""


@dataclass(frozen=True, kw_only=True)
class ParityResult:
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
) -> ParityResult:
    """Compare the pieces of a model with the whole model, in training and in evaluation.

    Compares the losses in training and in evaluation and, after each of two backward passes, all gradients and buffers.

    Both have their initial values. Without memory for two copies of the model and their gradients, nothing is compared.

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
    size = sum(parameter.nbytes for parameter in sequence.whole.model.parameters())
    variants = _VariantBuilder(build=build, sequence=sequence, device=device, seed=seed, precision=precision)
    with kept_generators():
        if sequence.trains_as_the_whole:
            if size <= free_bytes:
                examine(variants.whole().module)
            return ParityResult()
        needed = COPIES * size
        if needed <= free_bytes:
            whole = variants.whole()
            examine(whole.module)
            return ParityResult(error=_difference(whole, variants.pieces(), inputs, loss, seed=seed))
        return ParityResult(
            note="the stages were not compared with the whole model: two copies of the model with gradients need "
            f"{needed / 1e9:.3g} GB of {free_bytes / 1e9:.3g} GB; run some steps with a smaller variant of the model, "
            "such as one with fewer layers, to compare its stages"
        )


@dataclass(kw_only=True)
class _Variant:
    """The model whole or in pieces.

    Attributes:
        module: what is called with the inputs.
        call: calls it; None to only call it.
        tensors: its parameters and buffers, by the model's own names.
        precision: what its forward passes are computed in.
    """

    module: nn.Module
    tensors: Callable[[], Mapping[str, Tensor]]
    precision: Precision
    call: Callable[[nn.Module, Any], Any] | None = None

    def _output(self, inputs: Any) -> Any:
        return self.module(inputs) if self.call is None else self.call(self.module, inputs)

    def train(self, inputs: Any, loss: Callable[[Any], Tensor]) -> Tensor:
        """Run a forward and a backward pass, and return the loss."""
        with self.precision.autocast():
            value = loss(self._output(inputs))
        if value.requires_grad:
            value.backward()
        return value.detach()

    @torch.no_grad()
    def evaluate(self, inputs: Any, loss: Callable[[Any], Tensor]) -> Tensor:
        """Return the loss in evaluation."""
        self.module.eval()
        with self.precision.autocast():
            return loss(self._output(inputs))

    def gradients(self) -> dict[str, Tensor | None]:
        """Return the gradients by the name of the parameter."""
        named = self.tensors().items()
        return {name: t.grad for name, t in named if isinstance(t, nn.Parameter) and t.requires_grad}

    def buffers(self) -> dict[str, Tensor | None]:
        """Return the buffers by name."""
        return {name: t for name, t in self.tensors().items() if not isinstance(t, nn.Parameter)}


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

        def tensors() -> dict[str, Tensor]:
            return dict((*model.named_parameters(), *model.named_buffers()))

        return _Variant(module=model, tensors=tensors, precision=self.precision, call=self.sequence.call)

    def pieces(self) -> _Variant:
        """Return its pieces with their initial values."""
        layers = self.sequence.build_layers(self.build, range(len(self.sequence.names)), seed=self.seed)

        def tensors() -> dict[str, Tensor]:
            return {n: t for index, layer in layers.items() for n, t in self.sequence.tensors_of(index, layer).items()}

        module = nn.Sequential(*(layers[index] for index in range(len(layers))))
        return _Variant(module=module.to(self.device), tensors=tensors, precision=self.precision)


def _difference(
    whole: _Variant, pieces: _Variant, inputs: Any, loss: Callable[[Any], Tensor], *, seed: int
) -> str | None:
    """Return what differs first, and in which module; None if nothing does."""
    for number in range(PASSES):
        expected, found = _run_both(_Variant.train, whole, pieces, inputs, loss, seed=seed + number)
        if isinstance(found, str):
            return found
        if not _close(expected, found):
            return f"the loss of the pieces is {float(found):g}, that of the whole model {float(expected):g}"
        if (name := _first_different(whole.gradients(), pieces.gradients(), backwards=True)) is not None:
            return f"the gradient of {name} differs from the gradient in the whole model"
        if (name := _first_different(whole.buffers(), pieces.buffers())) is not None:
            return f"the forward pass leaves another value in the buffer {name} than the pass of the whole model"
    expected, found = _run_both(_Variant.evaluate, whole, pieces, inputs, loss, seed=seed)
    if isinstance(found, str):
        return found
    if not _close(expected, found):
        return f"in evaluation, the loss of the pieces is {float(found):g}, that of the whole model {float(expected):g}"
    return None


def _run_both(
    run: Callable[[_Variant, Any, Callable[[Any], Tensor]], Tensor],
    whole: _Variant,
    pieces: _Variant,
    inputs: Any,
    loss: Callable[[Any], Tensor],
    *,
    seed: int,
) -> tuple[Tensor, Tensor | str]:
    """Return the losses of the whole model and of the pieces, or why these fail. A model may change its batch."""
    seed_generators(seed)
    expected = run(whole, map_tensors(torch.clone, inputs), loss)
    seed_generators(seed)
    try:
        return expected, run(pieces, map_tensors(torch.clone, inputs), loss)
    except torch.OutOfMemoryError:
        raise
    except Exception as e:
        reason = " ".join(f"{type(e).__name__}: {e}".split())[:300]
        return expected, f"the pieces fail ({reason}), and the whole model does not"


def _first_different(
    whole: Mapping[str, Tensor | None], pieces: Mapping[str, Tensor | None], *, backwards: bool = False
) -> str | None:
    """Return the first name, or the last one, whose tensors differ.

    Names that only one variant has are left out, because the two may know a shared tensor by different names.
    """
    names = [name for name in whole if name in pieces]
    ordered = reversed(names) if backwards else names
    return next((name for name in ordered if not _close(whole[name], pieces[name])), None)


def _close(one: Tensor | None, other: Tensor | None) -> bool:
    """Compare two tensors, dense or sparse. A missing gradient equals one of zeros."""
    dense = [tensor.to_dense() if tensor.is_sparse else tensor for tensor in (one, other) if tensor is not None]
    if len(dense) < 2:
        return not any(bool(tensor.any()) for tensor in dense)
    if dense[0].shape != dense[1].shape or dense[0].dtype != dense[1].dtype:
        return False
    return torch.allclose(dense[0], dense[1], rtol=RTOL, atol=ATOL, equal_nan=True)

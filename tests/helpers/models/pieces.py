"""Whether the layers of a model in turn, as stages call them, train as the model does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.model.batch import map_tensors
from orchestrator.model.stages.sequence import LayerSequence

SEED = 3


def difference(
    build: Callable[[], nn.Module], sequence: LayerSequence, inputs: Any, loss: Callable[[Any], Tensor]
) -> str | None:
    """What differs first, in two backward passes and an evaluation; None if nothing does."""
    torch.manual_seed(SEED)
    whole = build()
    layers = sequence.build_layers(build, range(len(sequence.names)), seed=SEED)
    pieces = nn.Sequential(*(layers[index] for index in sorted(layers)))
    call = sequence.call or (lambda model, values: model(values))
    tensors: list[Mapping[str, Tensor]] = [
        {**dict(whole.named_parameters()), **dict(whole.named_buffers())},
        {name: t for index, layer in layers.items() for name, t in sequence.tensors_of(index, layer).items()},
    ]
    for number in range(3):
        losses = []
        for module, run in ((whole, call), (pieces, lambda model, values: model(values))):
            torch.manual_seed(SEED + number)
            module.train(number < 2)
            with torch.set_grad_enabled(number < 2):
                try:
                    losses.append(loss(run(module, map_tensors(torch.clone, inputs))))
                except Exception as e:
                    if module is whole:
                        raise
                    return f"the pieces fail ({type(e).__name__}: {e})"
            if losses[-1].requires_grad:
                losses[-1].backward()
        if not _close(losses[0], losses[1]):
            return f"the loss of pass {number}"
        for name in tensors[0].keys() & tensors[1].keys():
            one, other = tensors[0][name], tensors[1][name]
            if not (_close(one, other) and _close(one.grad, other.grad)):
                return name
    return None


def _close(one: Tensor | None, other: Tensor | None) -> bool:
    found = [t.detach().to_dense() if t.is_sparse else t.detach() for t in (one, other) if t is not None]
    if len(found) < 2:
        return not any(bool(tensor.any()) for tensor in found)
    return torch.allclose(*found, rtol=1e-4, atol=1e-6, equal_nan=True)

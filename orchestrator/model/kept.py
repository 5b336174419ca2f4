"""What a forward pass keeps in memory for its backward pass, beside the tensors of the model."""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import saved_tensors_hooks

from orchestrator.compat.torch import CAST, TorchDispatchMode, storage_key


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

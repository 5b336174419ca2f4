"""Buffers that a forward pass may change without an effect on the model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from torch import Tensor, nn

from orchestrator.compat.torch import own_buffers


class ReplacedBuffers(contextlib.AbstractContextManager[None]):
    """Lets a module have other buffers in a block, such as copies of its running statistics. Can be used again."""

    def __init__(self, module: nn.Module, replace: Callable[[Tensor], Tensor]):
        self._module = module
        self._replace = replace
        self._originals: list[tuple[dict[str, Tensor | None], dict[str, Tensor | None]]] = []

    def __enter__(self) -> None:
        self._originals = [(own_buffers(module), dict(own_buffers(module))) for module in self._module.modules()]
        for buffers, originals in self._originals:
            buffers.update({name: None if t is None else self._replace(t) for name, t in originals.items()})

    def __exit__(self, *error: object) -> None:
        for buffers, originals in self._originals:
            buffers.update(originals)
        self._originals = []

"""The repeated blocks of a model, such as the layers of a transformer: how they run, and activation checkpointing.

That runs the forward pass of a block again in the backward pass, instead of keeping activations. Chen et al., 2016,
"Training Deep Nets with Sublinear Memory Cost". Selective: Korthikanti et al., MLSys 2023, "Reducing Activation
Recomputation in Large Transformer Models".
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from orchestrator.compat.modules import own_buffers
from orchestrator.compat.torch import FakeTensor
from orchestrator.model.batch import tensors_in

ForwardPass = Callable[..., Any]
"""A forward pass that is called with the module and its inputs."""


class Block(nn.Module):
    """A block of a model. The class of the block has become a subclass of this one and of what it was.

    The class and not the instance, because a copy of a module has its class, and its own parameters. The names are none
    that a job gives attributes of its own.

    Attributes:
        __block_kind__: the class that the job has given the block.
        __block_recomputes__: what is computed again in the backward pass.
        __block_compiled__: the compiled forward pass of that class; None if it runs as it is.
        __block_recomputes_fakes__: whether a forward pass with fake tensors keeps no more than others do.
    """

    __block_kind__: ClassVar[type[nn.Module]]
    __block_recomputes__: ClassVar[Selection]
    __block_compiled__: ForwardPass | None = None
    __block_recomputes_fakes__ = False

    def __block_around__(self, forward: ForwardPass, *args: Any, **kwargs: Any) -> Any:
        """Run a forward pass, compiled or not, also where it is computed again."""
        return forward(self, *args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass of the block's own class. With fake tensors, it runs as the job has written it."""
        is_fake = any(isinstance(t, FakeTensor) for t in tensors_in((args, kwargs)))
        compiled = None if is_fake else self.__block_compiled__
        run = functools.partial(self.__block_around__, compiled or self.__block_kind__.forward, **kwargs)
        recomputes = (
            self.__block_recomputes__ != "none"
            and torch.is_grad_enabled()
            and (self.__block_recomputes_fakes__ or not is_fake)
        )
        if not recomputes:
            return run(*args)
        return recomputed(run, *args, block=self, selective=self.__block_recomputes__ == "selective")


def class_of(block: nn.Module) -> type[nn.Module]:
    """Return the class that the job has given a block."""
    return block.__block_kind__ if isinstance(block, Block) else type(block)


def likeness(block: nn.Module) -> Hashable:
    """Return a value that is equal for blocks that compute alike, with other numbers in their tensors."""
    tensors = [*block.named_parameters(), *block.named_buffers()]
    return class_of(block), repr(block), *((name, t.shape, t.dtype, t.requires_grad) for name, t in tensors)


def alike(blocks: Iterable[nn.Module]) -> list[list[nn.Module]]:
    """Return blocks by how they compute: by likeness, classes of modules, and attributes that are no tensors.

    Numbers that grow from one block to the next one of its likeness, such as that of a layer, do not tell them apart.
    """
    by_likeness: dict[Hashable, list[nn.Module]] = {}
    for block in blocks:
        by_likeness.setdefault(likeness(block), []).append(block)
    found: dict[Hashable, list[nn.Module]] = {}
    for key, group in by_likeness.items():
        attributes = [_attributes(block) for block in group]
        grow = {name for name in attributes[0] if _grows([of.get(name) for of in attributes])}
        for block, own in zip(group, attributes, strict=True):
            kept = frozenset(item for item in own.items() if item[0] not in grow)
            found.setdefault((key, kept), []).append(block)
    return list(found.values())


def _attributes(block: nn.Module) -> dict[tuple[str, str], Any]:
    found: dict[tuple[str, str], Any] = {}
    for path, module in block.named_modules():
        found[path, ""] = class_of(module)
        for name, value in vars(module).items():
            if name.startswith("_") or name == "training" or isinstance(value, nn.Module):
                continue
            if isinstance(value, (bool, int, float, str)):
                found[path, name] = value
            elif callable(value):
                found[path, name] = getattr(value, "__qualname__", type(value))
    return found


def _grows(values: Sequence[Any]) -> bool:
    numbers = all(type(value) in (int, float) for value in values)
    return numbers and len(values) > 1 and all(a < b for a, b in itertools.pairwise(values))


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the outermost repeated blocks of a model.

    They are the children of an ``nn.ModuleList`` or ``nn.Sequential`` that have the type of another child and have
    children themselves: a single operation keeps little more than its input, which a block keeps too.
    """
    children = [child for child in model.children() if next(child.children(), None) is not None]
    repeated: set[nn.Module] = set()
    if isinstance(model, (nn.ModuleList, nn.Sequential)):
        count = Counter(type(child) for child in children if not isinstance(child, (nn.ModuleList, nn.Sequential)))
        repeated = {child for child in children if count[type(child)] > 1}
    return [b for child in children for b in ([child] if child in repeated else blocks_of(child))]


def with_blocks(build: Callable[[], nn.Module], *, recomputes: Selection = "none") -> Callable[[], nn.Module]:
    """Return a constructor whose model has a :class:`Block` in place of each repeated block."""

    def built() -> nn.Module:
        model = build()
        blocks = blocks_of(model)
        classes = {kind: _block_class(kind, recomputes) for kind in map(type, blocks)}
        for block in blocks:
            block.__class__ = classes[type(block)]
        return model

    return built


def _block_class(kind: type[nn.Module], recomputes: Selection) -> type[nn.Module]:
    own = {"__block_kind__": kind, "__block_recomputes__": recomputes, "__module__": kind.__module__}
    return type(kind.__name__, (Block, kind), own)


Selection = Literal["none", "blocks", "selective"]
"""What is computed again: nothing, the blocks, or the blocks without their matrix products and convolutions."""

_KEPT = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten.baddbmm.default,
        torch.ops.aten.convolution.default,
    }
)
"""The operators whose results ``selective`` keeps. None of them is random: one that is left out of the recomputation
would let those after it draw other numbers."""

_thread = threading.local()


def recomputed(run: Callable[..., Any], *args: Any, block: nn.Module, selective: bool) -> Any:
    """Return ``run(*args)``, and let the backward pass call ``run`` again.

    Args:
        run: the forward pass of ``block``.
        args: its inputs, which are kept.
        block: the module whose buffers the second call must not change.
        selective: whether the results of matrix products and convolutions are kept too.
    """

    def contexts() -> tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]:
        if not selective:
            return contextlib.nullcontext(), _Recomputation(block)
        keeping, using = create_selective_checkpoint_contexts(_policy)
        return keeping, _both(_Recomputation(block), using)

    return checkpoint(run, *args, use_reentrant=False, context_fn=contexts)


def is_recomputing() -> bool:
    """Return whether this thread computes a forward pass again, in a backward pass."""
    return getattr(_thread, "recomputing", False)


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


@contextlib.contextmanager
def _both(
    outer: contextlib.AbstractContextManager[Any], inner: contextlib.AbstractContextManager[Any]
) -> Iterator[None]:
    with outer, inner:
        yield


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


class _Recomputation(ReplacedBuffers):
    """Lets a forward pass change copies of a block's buffers, because running statistics count a batch once.

    A backward pass in halves has two recomputations.
    """

    def __init__(self, block: nn.Module):
        super().__init__(block, Tensor.clone)

    def __enter__(self) -> None:
        super().__enter__()
        _thread.recomputing = True

    def __exit__(self, *error: object) -> None:
        _thread.recomputing = False
        super().__exit__(*error)

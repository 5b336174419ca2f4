"""Embeddings, and the output layers with as many rows, divided by rows: each rank has some of the words.

What such a module returns is whole on every rank: rows are summed, outputs are gathered, or divided in a way that does
not show. So what a model, a loss or a metric does with them does not matter, but the weights must be read by these
modules alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from orchestrator.compat.modules import calls_through, own_parameters
from orchestrator.compat.torch import FakeTensor, TorchDispatchMode, is_view_operator, storage_key
from orchestrator.model.batch import tensors_in
from orchestrator.model.peers import Peers
from orchestrator.model.tensor.logits import DividedLogits, Share, gathered
from orchestrator.model.tensor.region import enter, leave, part_of
from orchestrator.planning.placement import AxisCut

ROWS = AxisCut(over="tensor")


def vocabularies(model: nn.Module, blocks: Collection[nn.Module], count: int) -> dict[str, nn.Module]:
    """Return the embeddings and output layers outside of ``blocks`` that can be divided into ``count`` parts, by name.

    All modules that have one weight are among them, or none.
    """
    inside = {module for block in blocks for module in block.modules()}
    owners: dict[Tensor, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, []).append(module)
    rows = {module.num_embeddings for module in model.modules() if _is_embedding(module)}
    candidates = {
        module
        for module in model.modules()
        if module not in inside
        and (_is_embedding(module) or (type(module) is nn.Linear and module.out_features in rows))
        and "weight" in own_parameters(module)  # which a parametrization would compute
        and _all_have_rows(len(module.get_parameter("weight")), count)
    }
    fitting = {m for m in candidates if all({*owners[p]} <= candidates for p in of_rows(m).values())}
    return {name: module for name, module in model.named_modules() if module in fitting}


def of_rows(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of an embedding or output layer that have a row for each word, by attribute name."""
    names = ("weight",) if isinstance(module, nn.Embedding) else ("weight", "bias")
    own = own_parameters(module)
    return {name: parameter for name in names if (parameter := own.get(name)) is not None}


def _all_have_rows(rows: int, count: int) -> bool:
    return -(-rows // count) * (count - 1) < rows


def _is_embedding(module: nn.Module) -> bool:
    if not isinstance(module, nn.Embedding) or module.sparse or module.max_norm or module.scale_grad_by_freq:
        return False
    return type(module).forward is nn.Embedding.forward or _only_looks_up(module)


def _only_looks_up(embedding: nn.Embedding) -> bool:
    """Return whether the class of an embedding changes the vectors alone, as by a factor, without the weight."""
    others: list[Any] = []

    def see(func: Any, args: Any, kwargs: Any) -> Any:
        of_type = getattr(func, "__self__", None) in (Tensor.dtype, Tensor.device)
        if func is not F.embedding and not of_type and any(leaf is weight for leaf in tensors_in((args, kwargs))):
            others.append(func)
        return func(*args, **kwargs)

    weight = embedding.weight
    words = weight.new_zeros((1, 1), dtype=torch.long)
    try:
        with torch.no_grad(), _Seeing(see):
            embedding(words)
    except Exception:  # it is called with something else
        return False
    return not others


class _Seeing(TorchFunctionMode):
    """Calls ``see`` in place of each function of torch."""

    def __init__(self, see: Callable[[Any, Any, Any], Any]):
        super().__init__()
        self._see = see

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._see(func, args, kwargs or {})


class DirectUses:
    """Finds weights that are read while none of their modules runs.

    Attributes:
        found: the modules whose weights are.
    """

    def __init__(self, modules: Collection[nn.Module]):
        self.found: set[nn.Module] = set()
        self._owners: dict[int, list[nn.Module]] = {}
        for module in modules:
            self._owners.setdefault(storage_key(module.get_parameter("weight").untyped_storage()), []).append(module)
        self._together = {module: owners for owners in self._owners.values() for module in owners}
        self._running: list[nn.Module] = []

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Watch the operations in the block."""
        self._running.clear()
        with calls_through(self._call), Reads(self._see):
            yield

    def _call(self, original: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        if module in self._together and not isinstance(module.weight, FakeTensor):
            self.found |= {*self._together[module]}  # what is called with other tensors cannot be watched
        self._running.append(module)
        try:
            return original(module, *args, **kwargs)
        finally:
            self._running.pop()

    def _see(self, tensor: Tensor) -> None:
        owners = self._owners.get(storage_key(tensor.untyped_storage()), [])
        if not any(owner in self._running for owner in owners):
            self.found |= {*owners}


class Reads(TorchDispatchMode):
    """Calls ``see`` with each tensor whose values an operation reads."""

    def __init__(self, see: Callable[[Tensor], None]):
        super().__init__()  # type: ignore[no-untyped-call]
        self._see = see

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not is_view_operator(func):
            for tensor in tensors_in((args, kwargs)):
                self._see(tensor)
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def divide_rows(
    model: nn.Module, names: Sequence[str], *, index: int, count: int, peers: Peers, divided_logits: bool
) -> None:
    """Leave the rows of the part number ``index`` of ``count`` in modules of :func:`vocabularies`.

    Args:
        model: the model.
        names: the modules.
        index, count: which part that is.
        peers: the ranks that have the others.
        divided_logits: whether outputs are gathered, with gradients, only when something reads all of them.
    """
    parts: dict[Tensor, nn.Parameter] = {}
    for name in names:
        module = model.get_submodule(name)
        share = Share(index, count, peers, words=len(module.get_parameter("weight")))
        for attribute, whole in of_rows(module).items():
            if whole not in parts:
                parts[whole] = part_of(whole, ROWS, index=index, count=count)
            setattr(module, attribute, parts[whole])
        kind: type[_Rows] = _Embedding if isinstance(module, nn.Embedding) else _Output
        module.__class__ = type(type(module).__name__, (kind, type(module)), {"__module__": type(module).__module__})
        assert isinstance(module, _Rows)
        module.share, module.divided_logits = share, divided_logits


class _Rows(nn.Module):
    """Rows of a module. Its class has become a subclass of this one and of what it was."""

    weight: nn.Parameter
    share: Share
    divided_logits: bool


class _Embedding(_Rows):
    padding_idx: int | None

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        with _Seeing(self._look_up):
            out: Tensor = super().forward(*args, **kwargs)
        return out

    def _look_up(self, func: Any, args: Any, kwargs: Any) -> Any:
        given = dict(zip(("input", "weight"), args, strict=False)) | kwargs
        if func is not F.embedding or given["weight"] is not self.weight:
            return func(*args, **kwargs)
        words, size = given["input"], len(self.weight)
        own, here = self.share.place(words, size)
        padding = None if self.padding_idx is None else self.padding_idx - self.share.first
        if padding is not None and not 0 <= padding < size:
            padding = None
        return leave(F.embedding(own, self.weight, padding) * here[..., None], self.share.peers)


class _Output(_Rows):
    bias: nn.Parameter | None

    def forward(self, x: Tensor) -> Tensor:
        part = F.linear(enter(x, self.share.peers), self.weight, self.bias)
        divided = self.divided_logits and torch.is_grad_enabled()
        return DividedLogits.of(part, self.share) if divided else gathered(part, self.share)

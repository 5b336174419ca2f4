"""Part of a model, with the numbers that the whole one would have and without its memory.

A model's constructor draws its weights one after another from one generator, so that no part of it can
be had alone. Here it runs with fake tensors, which have a shape and no memory, and every operation is
noted; a random one is carried out too, on memory that is given back at once, so that the generator
moves on as it would have. Afterwards the operations that the wanted tensors come from are carried out
for real, each random one from the generator's state at its turn.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_FILLS = frozenset({"uniform_", "normal_", "random_", "exponential_", "cauchy_", "log_normal_", "geometric_"})
"""Random operations that overwrite a tensor without reading it."""


@dataclass(frozen=True)
class Outline:
    """A model of fake tensors; ``fake`` is the mode in which to call it."""

    model: nn.Module
    fake: FakeTensorMode

    def like(self, tensor: Tensor) -> Tensor:
        """A fake tensor of that shape, type and device."""
        with self.fake:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def outline(build: Callable[[], nn.Module], device: torch.device) -> Outline:
    """The model that ``build`` returns, on ``device``, without memory for its numbers. The generator is left alone."""
    recorder = _Recorder(draws=False)
    with recorder:
        model = build()
    if device.type != "cpu":
        with recorder.fake:
            moved = {id(place.tensor): place.tensor.detach().to(device) for place in places(model)}
        for place in list(places(model)):
            place.fill(moved)
    return Outline(model, recorder.fake)


def build_part(build: Callable[[], nn.Module], wanted: Callable[[str], bool], *, seed: int) -> nn.Module:
    """The model that ``build`` returns after ``torch.manual_seed(seed)``; what is not wanted stays fake.

    ``wanted`` is asked for the name of each parameter and buffer, a shared one under each of its names.
    Peak memory is that of the wanted ones and of the largest tensor that was drawn.
    """
    torch.manual_seed(seed)
    recorder = _Recorder(draws=True)
    with recorder:
        model = build()
    fakes = [place for place in places(model) if isinstance(place.tensor, FakeTensor)]
    chosen = {id(place.tensor): place.tensor for place in fakes if wanted(place.name)}
    real = recorder.values(chosen.values())
    for place in fakes:
        if id(place.tensor) in chosen:
            place.fill(real)
    return model


@dataclass(frozen=True)
class Place:
    """Where a parameter or buffer hangs in a model."""

    name: str
    owner: nn.Module
    attribute: str
    tensor: Tensor

    def fill(self, real: dict[int, Tensor]) -> None:
        """Put ``real[id(tensor)]`` in place of the tensor; a shared parameter stays shared."""
        value = real[id(self.tensor)]
        if self.attribute in self.owner._buffers:
            self.owner._buffers[self.attribute] = value
            return
        if not isinstance(value, nn.Parameter):
            value = nn.Parameter(value, requires_grad=self.tensor.requires_grad)
            real[id(self.tensor)] = value
        self.owner._parameters[self.attribute] = value


def places(model: nn.Module) -> Iterator[Place]:
    """Every parameter and buffer, a shared one at each of its places."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for attribute, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                yield Place(f"{prefix}.{attribute}" if prefix else attribute, module, attribute, tensor)


@dataclass(frozen=True)
class _Operation:
    """``state``: the generator's state before a random operation. ``reads`` and ``writes`` are storages."""

    func: Any
    args: Any
    kwargs: Any
    out: Any
    state: Tensor | None
    reads: set[int]
    writes: set[int]


class _Recorder(TorchDispatchMode):
    """Runs everything with fake tensors, and can tell their values afterwards.

    ``draws``: whether random operations move the generator on, without which values are arbitrary.
    """

    def __init__(self, *, draws: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws = draws
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._operations: list[_Operation] = []
        self._storages: dict[int, int] = {}
        self._alive: list[Any] = []  # so that no address is used twice

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        state = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            state = _generator(kwargs).get_state()
            if not self._draws:
                pass
            elif func.overloadpacket.__name__ in _FILLS:
                func(*pytree.tree_map_only(FakeTensor, _scratch, args), **kwargs)
            else:
                self._carry_out(func, args, kwargs)
        try:
            with self.fake:
                out = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            real = self._carry_out(func, args, kwargs)
            with self.fake:
                out = pytree.tree_map_only(Tensor, torch.empty_like, real)
        reads = self._numbers((args, kwargs))
        writes = self._numbers(out) | (reads if func._schema.is_mutable else set())
        self._operations.append(_Operation(func, args, kwargs, out, state, reads, writes))
        return out

    def values(self, tensors: Iterable[Tensor]) -> dict[int, Tensor]:
        """The value of each fake tensor, by its ``id``."""
        asked = list(tensors)
        known: dict[int, Tensor] = {}

        def value(tensor: Tensor) -> Tensor:
            if id(tensor) not in known:
                assert not isinstance(tensor, FakeTensor), "its operation is among those carried out"
                known[id(tensor)] = tensor.clone()  # a constant, which an operation may change
            return known[id(tensor)]

        for operation in self._behind(asked):
            args, kwargs = pytree.tree_map_only(Tensor, value, (operation.args, operation.kwargs))
            generator = _generator(operation.kwargs)
            now = generator.get_state()
            if operation.state is not None:
                generator.set_state(operation.state)
            out = operation.func(*args, **kwargs)
            generator.set_state(now)
            for fake, real in zip(pytree.tree_leaves(operation.out), pytree.tree_leaves(out), strict=True):
                if isinstance(fake, Tensor):
                    known[id(fake)] = real
        return {id(t): value(t) for t in asked}

    def _behind(self, tensors: Collection[Tensor]) -> list[_Operation]:
        """The operations that these tensors come from, in their order."""
        wanted = self._numbers(tensors)
        needed = []
        for operation in reversed(self._operations):
            if operation.writes & wanted:
                needed.append(operation)
                wanted |= operation.reads
        return needed[::-1]

    def _carry_out(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What an operation returns with the values of its fake tensors."""
        fakes = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, FakeTensor)]
        real = self.values(fakes)
        args, kwargs = pytree.tree_map_only(FakeTensor, lambda t: real[id(t)], (args, kwargs))
        return func(*args, **kwargs)

    def _numbers(self, tree: Any) -> set[int]:
        storages = [t.untyped_storage() for t in pytree.tree_leaves(tree) if isinstance(t, Tensor)]
        self._alive += storages
        return {self._storages.setdefault(s._cdata, len(self._storages)) for s in storages}


def _generator(kwargs: dict[str, Any]) -> torch.Generator:
    generator: torch.Generator | None = kwargs.get("generator")
    return torch.default_generator if generator is None else generator


def _scratch(fake: FakeTensor) -> Tensor:
    return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype)

"""A recording of tensor operations on fake tensors, and their execution for chosen tensors only.

A :class:`Recorder` is a dispatch mode: every operation of the code that it runs passes through it. It performs each one
on fake tensors, which have no memory, and records it together with the storages that it reads and writes. The value of
a tensor is found later by executing, in order, only those operations that its storage depends on.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.compat.generators import derived_seed
from orchestrator.compat.torch import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    loads_through,
    mutates,
    pytree,
    setting_fake_data,
    storage_key,
    without_fake_tensor_logs,
)

_FILLS = frozenset({"uniform_", "normal_", "random_", "exponential_", "cauchy_", "log_normal_", "geometric_"})
"""Random operations that overwrite a tensor without reading it."""
_OF_SIZES = frozenset({"empty", "zeros", "ones", "full", "rand", "randn"})
"""Operations that make a tensor of the sizes that are their first argument."""
_OF_ENTRIES = frozenset({"zero_", "fill_", "detach", "alias", "clone", "_to_copy"})
"""Operations on each entry of a tensor that torch does not tag as such."""


@dataclass(frozen=True)
class _View:
    """The part of a storage that a tensor covers. ``storage`` is a number that the recorder assigns."""

    storage: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def fills(self, shape: tuple[int, ...]) -> bool:
        """Return whether this is a whole storage, of this shape and without gaps."""
        strides = itertools.accumulate(reversed(shape[1:]), operator.mul, initial=1)
        return self.offset == 0 and self.shape == shape and self.stride == tuple(strides)[::-1]


@dataclass(frozen=True)
class _Operation:
    """A recorded operation.

    Attributes:
        number: its place in the recording.
        func: the operator.
        args, kwargs, out: its arguments and result, with a :class:`_View` in place of each tensor.
        state: the generator of a random operation and its state before it; None for other operations.
        reads, writes: the numbers of the storages that it reads and writes.
    """

    number: int
    func: Any
    args: Any
    kwargs: Any
    out: Any
    state: tuple[torch.Generator, Tensor] | None
    reads: frozenset[int]
    writes: frozenset[int]


class NeedsRandomValues(Exception):
    """The code depends on random values, which a recorder with ``draw=False`` does not draw."""


class Recorder(TorchDispatchMode):
    """Runs a constructor with fake tensors and computes the values of chosen tensors afterwards."""

    def __init__(self, *, draw: bool) -> None:
        """
        Args:
            draw: whether random operations advance their generator. They must if values are wanted afterwards or if
                the constructor depends on them.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._draw = draw
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._operations: list[_Operation] = []
        self._storages: dict[int, tuple[int, Any]] = {}
        """The number of each storage and the storage, by address. Keeping the storage keeps its address unique."""
        self._constants: dict[int, Tensor] = {}
        """Real tensors that the constructor used, by the number of their storage."""
        self._scratch_memory = torch.empty(0, dtype=torch.uint8)
        self._loading = False

    def run(self, build: Callable[[], nn.Module]) -> nn.Module:
        """Return the model that ``build`` makes, with fake tensors.

        Raises:
            NeedsRandomValues: ``build`` depends on random values and ``draw`` is False.
            Exception: whatever ``build`` raises, including the error of an operation that fake tensors do not support.
        """
        try:
            with self, setting_fake_data(), loads_through(self._load_real), without_fake_tensor_logs():
                return build()
        finally:
            self._scratch_memory = torch.empty(0, dtype=torch.uint8)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Perform an operation with fake tensors and record it. torch calls this for each operation within run()."""
        kwargs = kwargs or {}
        if self._loading:
            return func(*args, **kwargs)
        if func.overloadpacket is torch.ops.aten.set_ and _is_memory(args[1]):
            return self._place_over(args[0], func(torch.empty(0, dtype=args[0].dtype), *args[1:], **kwargs))
        views = pytree.tree_map_only(Tensor, self._view, (args, kwargs))  # now, because the operation may change them
        state = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            generator = _generator(args, kwargs)
            state = (generator, generator.get_state())
            if self._draw:
                self._advance_generator(func, args, kwargs, views)
        try:
            with self.mode:
                out = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            # The result or its shape depends on values, as with item() or nonzero(): compute it for real.
            out = pytree.tree_map_only(Tensor, lambda t: fake_like(t, self.mode), self._execute(func, views))
        out_views = pytree.tree_map_only(Tensor, self._view, out)
        reads = _storages(views)
        writes = _storages(out_views) | (reads if mutates(func) else frozenset())
        self._operations.append(
            _Operation(len(self._operations), func, views[0], views[1], out_views, state, reads, writes)
        )
        return out

    def _advance_generator(self, func: Any, args: Any, kwargs: Any, views: Any) -> None:
        """Execute a random operation and discard its result."""
        if func.overloadpacket.__name__ in _FILLS:
            func(*pytree.tree_map_only(FakeTensor, self._scratch, args), **kwargs)
        else:
            self._execute(func, views)

    def _load_real(self, load: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Let ``torch.load`` return real tensors, because it fills their memory and fake ones have none."""
        self._loading = True
        try:
            return load(*args, **kwargs)
        finally:
            self._loading = False

    def _place_over(self, tensor: Tensor, real: Tensor) -> Tensor:
        """Let a fake tensor stand for a real one. safetensors lays a tensor over the memory of its file this way."""
        self._view(real)
        with self.mode:
            return tensor.set_(self.mode.from_tensor(real))  # type: ignore[call-overload,no-any-return]

    def changed(self, tensor: Tensor) -> bool:
        """Return whether the constructor changed the values of a real tensor, which only its fake one records."""
        memory = storage_key(tensor.untyped_storage())
        storages = {n for n, constant in self._constants.items() if storage_key(constant.untyped_storage()) == memory}
        return any(storages & operation.writes for operation in self._operations)

    def values(self, tensors: Iterable[Tensor], *, seed: int | None = None) -> dict[int, Tensor]:
        """Compute the value of each of the given tensors, by the tensor's ``id``.

        Generators keep their states.

        Args:
            tensors: tensors of the model.
            seed: draws numbers for each random operation that depend on it and on the operation alone; None: those that
                the constructor would draw.
        """
        views = {id(tensor): self._view(tensor) for tensor in tensors}
        known = self._values(views.values(), seed)
        return {key: known[view] for key, view in views.items()}

    @torch.no_grad()
    def drawn_part(self, tensor: Tensor, shape: Sequence[int], *, seed: int) -> Tensor | None:
        """Return a tensor of another ``shape`` whose entries are drawn as those of ``tensor``, and no others.

        None if an entry depends on more than its own random numbers.
        """
        whole = self._view(tensor)
        parts: dict[int, Tensor] = {}  # by storage
        for operation in self._operations_behind({whole.storage}):
            name = operation.func.overloadpacket.__name__
            given = {v for v in pytree.tree_leaves((operation.args, operation.kwargs)) if isinstance(v, _View)}
            by_entry = name in _FILLS | _OF_ENTRIES or torch.Tag.pointwise in operation.func.tags
            if not (by_entry or name in _OF_SIZES) or any(view.storage not in parts for view in given):
                return None
            if not all(isinstance(view, _View) and view.fills(whole.shape) for view in (*given, operation.out)):
                return None
            args, kwargs = pytree.tree_map_only(_View, lambda v: parts[v.storage], (operation.args, operation.kwargs))
            with _drawing(operation, seed):
                first = args[0] if by_entry else shape
                parts[operation.out.storage] = operation.func(first, *args[1:], **kwargs)
        return parts.get(whole.storage)

    @torch.no_grad()
    def _values(self, wanted: Collection[_View], seed: int | None = None) -> dict[_View, Tensor]:
        """Execute the operations behind the wanted views, freeing each storage after its last use."""
        kept = {view.storage for view in wanted}
        needed = self._operations_behind(kept)
        written = {storage for operation in needed for storage in operation.writes}
        last_use = {storage: i for i, operation in enumerate(needed) for storage in operation.reads | operation.writes}
        known: defaultdict[int, dict[_View, Tensor]] = defaultdict(dict)  # by storage

        def value(view: _View) -> Tensor:
            views = known[view.storage]
            if view not in views:
                memory = next(iter(views.values())) if views else self._constants[view.storage]
                if not views and (view.storage in written or view.storage in kept):
                    memory = _storage_copy(memory)
                views[view] = memory.as_strided(view.shape, view.stride, view.offset)
            return views[view]

        for i, operation in enumerate(needed):
            args, kwargs = pytree.tree_map_only(_View, value, (operation.args, operation.kwargs))
            with _drawing(operation, seed):
                out = operation.func(*args, **kwargs)
            for view, real in zip(pytree.tree_leaves(operation.out), pytree.tree_leaves(out), strict=True):
                if isinstance(view, _View):
                    known[view.storage][view] = real
            for storage in operation.reads | operation.writes:
                if last_use[storage] == i and storage not in kept:
                    known.pop(storage, None)
        return {view: value(view) for view in wanted}

    def _operations_behind(self, storages: Collection[int]) -> list[_Operation]:
        """Return the recorded operations that the contents of these storages depend on, in order."""
        wanted = set(storages)
        needed = []
        for operation in reversed(self._operations):
            if operation.writes & wanted:
                needed.append(operation)
                wanted |= operation.reads
        return needed[::-1]

    def _execute(self, func: Any, views: Any) -> Any:
        """Execute an operation with the values of its arguments ``(args, kwargs)``, given as views."""
        if not self._draw and any(operation.state for operation in self._operations_behind(_storages(views))):
            raise NeedsRandomValues
        known = self._values([view for view in pytree.tree_leaves(views) if isinstance(view, _View)])
        args, kwargs = pytree.tree_map_only(_View, known.__getitem__, views)
        return func(*args, **kwargs)

    def _scratch(self, fake: FakeTensor) -> Tensor:
        """Return memory with the layout of ``fake`` for values that are never read.

        It is one block of the largest size so far. Blocks that come and go between small ones that stay would fragment
        the heap, and the C library would not reuse them.
        """
        size_bytes = fake.untyped_storage().nbytes()
        if self._scratch_memory.numel() < size_bytes or self._scratch_memory.device != fake.device:
            self._scratch_memory = torch.empty(0, dtype=torch.uint8)  # free the old block first
            self._scratch_memory = torch.empty(size_bytes, dtype=torch.uint8, device=fake.device)
        memory = torch.empty(0, dtype=fake.dtype, device=fake.device)
        return memory.set_(self._scratch_memory.untyped_storage(), fake.storage_offset(), fake.shape, fake.stride())

    def _view(self, tensor: Tensor) -> _View:
        fake = tensor if isinstance(tensor, FakeTensor) else self.mode.from_tensor(tensor)
        storage = fake.untyped_storage()
        number, _ = self._storages.setdefault(storage_key(storage), (len(self._storages), storage))
        if fake is not tensor:
            self._constants.setdefault(number, tensor)
        return _View(number, int(fake.storage_offset()), tuple(fake.shape), fake.stride(), fake.dtype)


@contextlib.contextmanager
def _drawing(operation: _Operation, seed: int | None) -> Iterator[None]:
    """Let a random operation draw what the constructor would, or with a ``seed`` what belongs to both."""
    if operation.state is None:
        yield
        return
    generator, state = operation.state
    before = generator.get_state()
    if seed is None:
        generator.set_state(state)
    else:
        generator.manual_seed(derived_seed(seed, operation.number))
    try:
        yield
    finally:
        generator.set_state(before)


def _is_memory(value: Any) -> bool:
    return isinstance(value, torch.UntypedStorage) and value.device.type != "meta"


def _storage_copy(tensor: Tensor) -> Tensor:
    """Return a copy of the whole storage of a tensor, which may cover only a part of it."""
    whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
    return whole.clone()


def _storages(tree: Any) -> frozenset[int]:
    return frozenset(view.storage for view in pytree.tree_leaves(tree) if isinstance(view, _View))


def _generator(args: Any, kwargs: dict[str, Any]) -> torch.Generator:
    """Return the generator that a random operation draws from."""
    given: torch.Generator | None = kwargs.get("generator")
    if given is not None:
        return given
    devices = [t.device for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    device = torch.device(kwargs.get("device") or "cpu") if not devices else devices[0]
    if device.type != "cuda":
        return torch.default_generator
    index = torch.cuda.current_device() if device.index is None else device.index
    generator: torch.Generator = torch.cuda.default_generators[index]
    return generator


def fake_like(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    """Return a fake tensor with the shape, strides, dtype and device of ``tensor``."""
    # Not mode.from_tensor(), which imports the compiler and takes seconds.
    with mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)

"""Part of a model, with the numbers that the whole one would have and without its memory.

A model's constructor draws its weights one after another from one generator, so that no part of it can
be had alone. Here it runs with fake tensors, which have a shape and no memory, and every operation is
noted; a random one is carried out too, on memory that is given back at once, so that the generator
moves on as it would have. Afterwards the operations that the wanted tensors come from are carried out
for real, each random one from the generator's state at its turn.

A constructor that does what fake tensors cannot (``.numpy()``, say) builds the whole model instead, of
which the part is kept.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
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

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


@dataclass(frozen=True)
class Outline:
    """A model of fake tensors; ``fake`` is the mode in which to call it.

    ``undivided``: why :func:`build_part` has to build the whole model first; None: it has not.
    """

    model: nn.Module
    fake: FakeTensorMode
    undivided: str | None = None

    def like(self, tensor: Tensor) -> Tensor:
        """A fake tensor of that shape, type and device."""
        return _like(tensor, self.fake)


def outline(build: Callable[[], nn.Module], device: torch.device) -> Outline:
    """The model that ``build`` returns, on ``device``, without memory for its numbers. The generator is left alone."""
    recorder = _Recorder(draws=False)
    undivided = None
    with torch.random.fork_rng():
        try:
            try:
                model = recorder.run(build)
            except _DependsOnDraws:
                recorder = _Recorder(draws=True)
                model = recorder.run(build)
        except Exception as e:
            undivided = f"{type(e).__name__}: {e}"
        if undivided is not None:
            model = _without(build(), lambda name: False, recorder.fake)
    if device.type != "cpu":
        with recorder.fake:
            moved = {id(place.tensor): place.tensor.detach().to(device) for place in places(model)}
        for place in list(places(model)):
            place.fill(moved)
    return Outline(model, recorder.fake, undivided)


def build_part(build: Callable[[], nn.Module], wanted: Callable[[str], bool], *, seed: int) -> nn.Module:
    """The model that ``build`` returns after ``torch.manual_seed(seed)``; what is not wanted stays fake.

    ``wanted`` is asked for the name of each tensor, a shared one under each of its names. Peak memory is
    that of the wanted ones and of the largest tensor that was drawn.
    """
    torch.manual_seed(seed)
    recorder = _Recorder(draws=True)
    with contextlib.suppress(Exception):
        model = recorder.run(build)
        open_places = [p for p in places(model) if isinstance(p.tensor, FakeTensor) or recorder.changed(p.tensor)]
        chosen = {id(place.tensor): place.tensor for place in open_places if wanted(place.name)}
        real = recorder.values(chosen.values())
        for place in open_places:
            if id(place.tensor) in chosen:
                place.fill(real)
        return model
    torch.manual_seed(seed)
    return _without(build(), wanted, recorder.fake)


def _without(model: nn.Module, wanted: Callable[[str], bool], fake: FakeTensorMode) -> nn.Module:
    """``model`` with fake tensors in place of what is not wanted under any of its names."""
    every = list(places(model))
    kept = {id(place.tensor) for place in every if wanted(place.name)}
    dropped = [place for place in every if id(place.tensor) not in kept]
    fakes = {id(place.tensor): _like(place.tensor, fake) for place in dropped}
    for place in dropped:
        place.fill(fakes)
    return model


@dataclass(frozen=True)
class Place:
    """Where a tensor hangs in a model: a parameter, a buffer, or any other attribute or part of one."""

    name: str
    owner: nn.Module
    attribute: str
    tensor: Tensor

    def fill(self, real: dict[int, Tensor]) -> None:
        """Put ``real[id(tensor)]`` in place of the tensor; a shared parameter stays shared."""
        value = real[id(self.tensor)]
        if isinstance(self.tensor, nn.Parameter) and not isinstance(value, nn.Parameter):
            value = real[id(self.tensor)] = self._parameter(value)
        for held in (self.owner._parameters, self.owner._buffers, vars(self.owner)):
            if self.attribute in held:
                held[self.attribute] = pytree.tree_map_only(
                    Tensor, lambda t: value if t is self.tensor else t, held[self.attribute]
                )

    def _parameter(self, value: Tensor) -> nn.Parameter:
        """With the marks and hooks that the job has put on the one in this place."""
        parameter = nn.Parameter(value, requires_grad=self.tensor.requires_grad)
        of_every_tensor = {"_is_param", *vars(self.tensor.detach())}
        vars(parameter).update({k: v for k, v in vars(self.tensor).items() if k not in of_every_tensor})
        parameter._backward_hooks = self.tensor._backward_hooks
        parameter._post_accumulate_grad_hooks = self.tensor._post_accumulate_grad_hooks
        return parameter


def places(model: nn.Module) -> Iterator[Place]:
    """Every tensor of a model, a shared one at each of its places."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        held = {**module._parameters, **module._buffers}
        held |= {name: value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE}
        for attribute, value in held.items():
            name = f"{prefix}.{attribute}" if prefix else attribute
            for path, leaf in pytree.tree_leaves_with_path(value):
                if isinstance(leaf, Tensor):
                    yield Place(name + pytree.keystr(path), module, attribute, leaf)


@dataclass(frozen=True)
class _View:
    """A tensor as it was at a moment; ``storage`` is a number of ours."""

    storage: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class _Operation:
    """``args``, ``kwargs`` and ``out`` have views in place of tensors. ``state``: that of the generator before a
    random operation. ``reads`` and ``writes`` are storages."""

    func: Any
    args: Any
    kwargs: Any
    out: Any
    state: tuple[torch.Generator, Tensor] | None
    reads: frozenset[int]
    writes: frozenset[int]


class _DependsOnDraws(Exception):
    """What the constructor does next depends on a random number, and those are not drawn."""


class _Recorder(TorchDispatchMode):
    """Runs everything with fake tensors, and can tell their values afterwards.

    ``draws``: whether random operations move the generator on, as they must where anything depends on the numbers.
    """

    def __init__(self, *, draws: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws = draws
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._operations: list[_Operation] = []
        self._storages: dict[int, tuple[int, Any]] = {}
        """Numbers by address; the storages are kept, so that no address is used twice."""
        self._constants: dict[int, Tensor] = {}
        """Real tensors, by the number of their storage."""
        self._spare = torch.empty(0, dtype=torch.uint8)
        self._reads_file = False

    def run(self, build: Callable[[], nn.Module]) -> nn.Module:
        with self, _converting_by_data(), self._reading_files():
            return build()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._reads_file:
            return func(*args, **kwargs)
        if func.overloadpacket is torch.ops.aten.set_ and _is_memory(args[1]):
            return self._lie_in(args[0], func(torch.empty(0, dtype=args[0].dtype), *args[1:], **kwargs))
        views = pytree.tree_map_only(Tensor, self._view, (args, kwargs))  # before, since an operation may change them
        state = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            generator = _generator(args, kwargs)
            state = (generator, generator.get_state())
            if not self._draws:
                pass
            elif func.overloadpacket.__name__ in _FILLS:
                func(*pytree.tree_map_only(FakeTensor, self._unwanted, args), **kwargs)
            else:
                self._carry_out(func, views)
        try:
            with self.fake:
                out = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            out = pytree.tree_map_only(Tensor, lambda t: _like(t, self.fake), self._carry_out(func, views))
        out_views = pytree.tree_map_only(Tensor, self._view, out)
        reads = _storages(views)
        writes = _storages(out_views) | (reads if func._schema.is_mutable else frozenset())
        self._operations.append(_Operation(func, views[0], views[1], out_views, state, reads, writes))
        return out

    @contextlib.contextmanager
    def _reading_files(self) -> Iterator[None]:
        """``torch.load`` gives real tensors: its readers fill memory that fake ones do not have."""
        load = torch.load

        def load_real(*args: Any, **kwargs: Any) -> Any:
            self._reads_file = True
            try:
                return load(*args, **kwargs)
            finally:
                self._reads_file = False

        torch.load = load_real
        try:
            yield
        finally:
            torch.load = load

    def _lie_in(self, tensor: Tensor, real: Tensor) -> Tensor:
        """Give a fake tensor the place of a real one, as a safetensors file does with its own memory."""
        self._view(real)
        with self.fake:
            return tensor.set_(self.fake.from_tensor(real))  # type: ignore[call-overload,no-any-return]

    def changed(self, tensor: Tensor) -> bool:
        """Whether the constructor has changed the numbers of a real tensor, which happened to its fake one alone."""
        memory = tensor.untyped_storage()._cdata
        storages = {n for n, constant in self._constants.items() if constant.untyped_storage()._cdata == memory}
        return any(storages & operation.writes for operation in self._operations)

    def values(self, tensors: Iterable[Tensor]) -> dict[int, Tensor]:
        """The value of each tensor, by its ``id``."""
        asked = {id(tensor): self._view(tensor) for tensor in tensors}
        known = self._values(asked.values())
        return {number: known[view] for number, view in asked.items()}

    @torch.no_grad()
    def _values(self, wanted: Collection[_View]) -> dict[_View, Tensor]:
        kept = {view.storage for view in wanted}
        needed = self._behind(kept)
        last_use = {storage: i for i, operation in enumerate(needed) for storage in operation.reads | operation.writes}
        known: defaultdict[int, dict[_View, Tensor]] = defaultdict(dict)

        def value(view: _View) -> Tensor:
            views = known[view.storage]
            if view not in views:
                memory = next(iter(views.values())) if views else _copy_of_all(self._constants[view.storage])
                views[view] = memory.as_strided(view.shape, view.stride, view.offset)
            return views[view]

        states = {id(op.state[0]): (op.state[0], op.state[0].get_state()) for op in needed if op.state}
        for i, operation in enumerate(needed):
            args, kwargs = pytree.tree_map_only(_View, value, (operation.args, operation.kwargs))
            if operation.state is not None:
                generator, state = operation.state
                generator.set_state(state)
            out = operation.func(*args, **kwargs)
            for view, real in zip(pytree.tree_leaves(operation.out), pytree.tree_leaves(out), strict=True):
                if isinstance(view, _View):
                    known[view.storage][view] = real
            for storage in operation.reads | operation.writes:
                if last_use[storage] == i and storage not in kept:
                    known.pop(storage, None)
        for generator, state in states.values():
            generator.set_state(state)
        return {view: value(view) for view in wanted}

    def _behind(self, storages: Collection[int]) -> list[_Operation]:
        """The operations that the contents of these storages come from, in their order."""
        wanted = set(storages)
        needed = []
        for operation in reversed(self._operations):
            if operation.writes & wanted:
                needed.append(operation)
                wanted |= operation.reads
        return needed[::-1]

    def _carry_out(self, func: Any, views: Any) -> Any:
        """What an operation returns for the values of its arguments."""
        if not self._draws and any(operation.state for operation in self._behind(_storages(views))):
            raise _DependsOnDraws
        known = self._values([view for view in pytree.tree_leaves(views) if isinstance(view, _View)])
        args, kwargs = pytree.tree_map_only(_View, known.__getitem__, views)
        return func(*args, **kwargs)

    def _unwanted(self, fake: FakeTensor) -> Tensor:
        """Memory for the numbers of ``fake``, which nobody will read. It is one piece, and the largest ever asked for:
        the C library makes no use of many that come and go, between small ones that stay."""
        needed = fake.untyped_storage().nbytes()
        if self._spare.numel() < needed or self._spare.device != fake.device:
            self._spare = torch.empty(0, dtype=torch.uint8)  # gone before its successor comes
            self._spare = torch.empty(needed, dtype=torch.uint8, device=fake.device)
        memory = torch.empty(0, dtype=fake.dtype, device=fake.device)
        return memory.set_(self._spare.untyped_storage(), fake.storage_offset(), fake.shape, fake.stride())

    def _view(self, tensor: Tensor) -> _View:
        fake = tensor if isinstance(tensor, FakeTensor) else self.fake.from_tensor(tensor)
        storage = fake.untyped_storage()
        number, _ = self._storages.setdefault(storage._cdata, (len(self._storages), storage))
        if fake is not tensor:
            self._constants.setdefault(number, tensor)
        return _View(number, int(fake.storage_offset()), tuple(fake.shape), fake.stride(), fake.dtype)


@contextlib.contextmanager
def _converting_by_data() -> Iterator[None]:
    """``Module.to`` and its like change parameters in place: fake ones by swapping, which their mode makes impossible;
    here by giving them other data, as they do with real ones."""

    def take(parameter: FakeTensor, converted: FakeTensor) -> None:
        parameter.data = converted
        parameter.fake_device = converted.fake_device

    swap = torch.utils.swap_tensors
    torch.utils.swap_tensors = take
    try:
        yield
    finally:
        torch.utils.swap_tensors = swap


def _is_memory(value: Any) -> bool:
    return isinstance(value, torch.UntypedStorage) and value.device.type != "meta"


def _copy_of_all(tensor: Tensor) -> Tensor:
    """The memory that a tensor lies in, of which it may be a part."""
    whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
    return whole.clone()


def _storages(tree: Any) -> frozenset[int]:
    return frozenset(view.storage for view in pytree.tree_leaves(tree) if isinstance(view, _View))


def _generator(args: Any, kwargs: dict[str, Any]) -> torch.Generator:
    """The one that a random operation draws from."""
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


def _like(tensor: Tensor, fake: FakeTensorMode) -> Tensor:
    # Not fake.from_tensor(), which imports the compiler: seconds.
    with fake:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)

"""A forward pass as a tape: calls of submodules as they are, and the tensor operations between them.

The model's own ``forward`` runs once and is recorded. A submodule that holds no cut point is a *leaf*: its call is one
step of the tape, and its operations are not recorded. Custom autograd functions, hooks, state kept in attributes,
data-dependent branches, and compiled or quantised blocks therefore run as they are. Only the code between leaves, the
*glue*, is recorded operation by operation (:class:`torch.overrides.TorchFunctionMode`). Its control flow is resolved by
the recording, so glue that branches on the values of tensors is refused.

The recorded shapes hold for every micro-batch, because all micro-batches have one shape.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from orchestrator.compat.modules import calls_through
from orchestrator.compat.torch import pytree
from orchestrator.model.batch import tensors_in
from orchestrator.model.failed_call import error_with_place
from orchestrator.model.tensor_slots import tensor_slots
from orchestrator.user_code.callbacks import reading_steps

_READ_VALUES = frozenset({"item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__"})
_DIFFERENTIATE = frozenset({"grad", "backward"})
_WRITE = frozenset({"__setitem__", "__set__"})
"""Functions that return nothing and change a tensor."""


Call = Callable[[nn.Module, Any], Any]
"""Calls a model with its input, and returns the output, as ``Job.forward`` does."""


class TapeError(ValueError):
    """The forward pass cannot be recorded; the text says where and why.

    Attributes:
        module: the name of the module whose own code cannot be, empty for the model; None if that is not known.
    """

    module: str | None = None


@dataclass(frozen=True)
class Slot:
    """A tensor of the forward pass: one of the inputs, or a result of a step."""

    index: int


@dataclass(frozen=True)
class HeldTensor:
    """A tensor that the model holds, by its :class:`~orchestrator.model.tensor_slots.TensorSlot` name."""

    name: str


@dataclass(frozen=True, kw_only=True)
class Step:
    """One call.

    Attributes:
        target: a function, or the name of a leaf module.
        arguments: ``(args, kwargs)``, in which ``Slot`` and ``HeldTensor`` stand for tensors.
        results: the slots of the tensors in the result, in the order of ``model.batch.tensors_in``.
        grad_enabled: whether autograd recorded the call.
    """

    target: Callable[..., Any] | str
    arguments: tuple[tuple[Any, ...], Mapping[str, Any]]
    results: tuple[Slot, ...]
    grad_enabled: bool

    def slots(self) -> Iterator[Slot]:
        """Yield the slots of the arguments."""
        yield from (leaf for leaf in pytree.tree_leaves(self.arguments) if isinstance(leaf, Slot))

    def held(self) -> Iterator[str]:
        """Yield the names of the model's tensors that are used directly."""
        yield from (leaf.name for leaf in pytree.tree_leaves(self.arguments) if isinstance(leaf, HeldTensor))


@dataclass(frozen=True, kw_only=True)
class Tape:
    """A recorded forward pass.

    Attributes:
        num_inputs: the number of tensors in the model's input. They have the first slots.
        steps: the calls, in order.
        begins: for each submodule that the glue calls, the position of its first step.
        output: the model's output, in which ``Slot`` and ``HeldTensor`` stand for tensors.
    """

    num_inputs: int
    steps: tuple[Step, ...]
    begins: Mapping[str, int]
    output: Any


def record(model: nn.Module, inputs: Any, *, opened: Collection[str], call: Call | None = None) -> Tape:
    """Run ``model(inputs)`` and record it.

    Args:
        model: the model, in the mode (training or evaluation) to record.
        inputs: nested tensors; the model is called with them as its one argument.
        opened: the names of the submodules whose own forward is recorded; all others are called as they are.
        call: calls the model with the inputs, and is recorded too; None to only call it.

    Raises:
        TapeError: the glue reads values of tensors, or uses a tensor or an object that a stage cannot rebuild.
    """
    recorder = _Recorder(model, opened)
    for tensor in tensors_in(inputs):
        recorder.new_slot(tensor)
    num_inputs = recorder.num_slots
    with calls_through(recorder.call), reading_steps(recorder.read_step), recorder:
        out = model(inputs) if call is None else recorder.call_job(call, model, inputs)
    return Tape(
        num_inputs=num_inputs,
        steps=tuple(recorder.steps),
        begins=recorder.begins,
        output=recorder.stand_ins(out, "the output"),
    )


def play(
    steps: Sequence[Step], values: dict[Slot, Tensor], modules: Mapping[str, nn.Module], held: Mapping[str, Tensor]
) -> None:
    """Execute ``steps``: read the tensors of their arguments from ``values``, and add their results to it."""
    for step in steps:
        args, kwargs = restore(step.arguments, values, held)
        target = step.target
        if isinstance(target, str):  # what a class adds in a __call__ of its own is in the recording
            target = functools.partial(nn.Module.__call__, modules[target])
        with contextlib.nullcontext() if step.grad_enabled else torch.no_grad():
            out = target(*args, **kwargs)
        for slot, tensor in zip(step.results, tensors_in(out), strict=True):
            values[slot] = tensor


def restore(tree: Any, values: Mapping[Slot, Tensor], held: Mapping[str, Tensor]) -> Any:
    """Return ``tree`` with tensors in place of ``Slot`` and ``HeldTensor``."""

    def value(leaf: Any) -> Any:
        if isinstance(leaf, Slot):
            return values[leaf]
        return held[leaf.name] if isinstance(leaf, HeldTensor) else leaf

    return pytree.tree_map(value, tree)


class _Recorder(TorchFunctionMode):
    def __init__(self, model: nn.Module, opened: Collection[str]):
        super().__init__()
        self.steps: list[Step] = []
        self.begins: dict[str, int] = {}
        self.num_slots = 0
        self._names = {module: name for name, module in model.named_modules()}
        self._opened = frozenset(opened)
        self._slots: dict[int, Slot] = {}
        self._held = {id(slot.tensor): HeldTensor(slot.name) for slot in tensor_slots(model)}
        self._alive: list[Any] = []  # so that no two tensors have the same id
        self._inside_leaf = False
        self._open: list[str] = []
        """The modules whose own forward is running, from the outermost one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._inside_leaf:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        if name in _READ_VALUES and any(self._is_computed(tensor) for tensor in tensors_in(args)):
            raise TapeError(
                f"{self._open[-1]}: its forward() reads the values of a tensor ({name}) outside of the layers"
            )
        if name in _DIFFERENTIATE and any(self._is_computed(tensor) for tensor in tensors_in(args)):
            raise TapeError(f"{self._open[-1]}: its forward() computes a gradient outside of the layers")
        arguments = None
        out = None
        try:
            # Before the call, which may change its arguments.
            arguments = self.stand_ins((args, kwargs), name)
        except TapeError:
            out = func(*args, **kwargs)
            if name in _WRITE or tensors_in(out):
                raise
            return out
        out = func(*args, **kwargs)
        if name in _WRITE or tensors_in(out):
            self._add(func, arguments, out)
        return out

    def call(self, forward: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        """Call a module of the model, and record the call if the module is a leaf."""
        name = self._names.get(module)
        if self._inside_leaf or name is None:
            return forward(module, *args, **kwargs)
        if name:
            self.begins.setdefault(name, len(self.steps))
        if not name or name in self._opened:
            return self._call_opened(forward, module, args, kwargs)
        arguments = self.stand_ins((args, kwargs), f"the arguments of {name}")
        before = _fingerprint((args, kwargs))
        self._inside_leaf = True
        try:
            out = forward(module, *args, **kwargs)
        finally:
            self._inside_leaf = False
        if _fingerprint((args, kwargs)) != before:
            objects = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if _is_object(leaf)]
            kinds = {type(leaf).__name__ for leaf in objects}
            raise TapeError(
                f"the layer {name} changes an object that it is called with ({', '.join(sorted(kinds))}); "
                f"{_remedy(objects[0])}"
            )
        self._add(name, arguments, out)
        return out

    def _call_opened(self, forward: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Run a module's own forward, whose operations are recorded."""
        self._open.append(" ".join(filter(None, (type(module).__name__, self._names[module]))))
        try:
            return forward(module, *args, **kwargs)
        except TapeError as e:
            e.module = self._names[module] if e.module is None else e.module
            raise
        except Exception as e:
            error = self._failed(e)
            error.module = self._names[module]
            raise error from e
        finally:
            self._open.pop()

    def call_job(self, call: Call, model: nn.Module, inputs: Any) -> Any:
        """Run what a job does before and after the model, whose operations are recorded."""
        self._open.append("the job")
        try:
            return call(model, inputs)
        except TapeError:
            raise
        except Exception as e:
            raise self._failed(e) from e
        finally:
            self._open.pop()

    def _failed(self, error: Exception) -> TapeError:
        return TapeError(
            f"{self._open[-1]}: its forward() fails with tensors that have a shape and no values, outside of the "
            f"layers ({error_with_place(error)})"
        )

    def read_step(self) -> None:
        """Refuse that the glue asks for the step, which is another one when the recording is played."""
        if not self._inside_leaf:
            raise TapeError(f"{self._open[-1]}: its forward() calls current_step() outside of the layers")

    def new_slot(self, tensor: Tensor) -> Slot:
        """Give a tensor the next slot."""
        slot = Slot(self.num_slots)
        self.num_slots += 1
        self._alive.append(tensor)
        self._slots[id(tensor)] = slot
        return slot

    def stand_ins(self, tree: Any, where: str) -> Any:
        """Return ``tree`` with ``Slot`` and ``HeldTensor`` in place of tensors.

        Raises:
            TapeError: a tensor is neither the model's nor computed from the input, or an object holds such tensors.
        """

        def stand_in(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                if isinstance(leaf, nn.Module) and any(True for _ in tensor_slots(leaf)):
                    raise TapeError(f"{where}: a {type(leaf).__name__} is passed on, and only tensors can pass between "
                                    "layers; pass its result, or the tensor of it that is needed")  # fmt: skip
                if any(self._is_computed(tensor) for tensor in _tensors_of_object(leaf)):
                    raise TapeError(f"{where}: {_described(leaf)} holds tensors; only tensors, tuples, lists and dicts "
                                    f"of them can pass between layers; {_remedy(leaf)}")  # fmt: skip
                return leaf
            found = self._slots.get(id(leaf)) or self._held.get(id(leaf))
            if found is None:
                raise TapeError(f"{where}: a tensor of shape {list(leaf.shape)} is neither an attribute of the model "
                                "nor computed from its input")  # fmt: skip
            return found

        return pytree.tree_map(stand_in, tree)

    def _is_computed(self, tensor: Tensor) -> bool:
        return id(tensor) in self._slots

    def _add(self, target: Callable[..., Any] | str, arguments: Any, out: Any) -> None:
        results = tuple(self.new_slot(tensor) for tensor in tensors_in(out))
        self._alive.append(out)
        self.steps.append(
            Step(target=target, arguments=arguments, results=results, grad_enabled=torch.is_grad_enabled())
        )


_PLAIN = (type(None), bool, int, float, complex, str, bytes, slice, range, type, type(...), torch.dtype, torch.device)
_PLAIN_TORCH = (torch.layout, torch.memory_format, torch.Size, torch.Generator)


def _described(leaf: Any) -> str:
    return f"{'the dataclass' if dataclasses.is_dataclass(leaf) else 'a'} {type(leaf).__name__}"


def _remedy(leaf: Any) -> str:
    if dataclasses.is_dataclass(leaf):
        return "pass its tensors, or register the class with torch's pytree"
    return "a cache of a Hugging Face model is turned off by use_cache=False in its configuration"


def _is_object(leaf: Any) -> bool:
    return not isinstance(leaf, (Tensor, *_PLAIN, *_PLAIN_TORCH)) and not callable(leaf)


def _tensors_of_object(leaf: Any, depth: int = 3) -> Iterator[Tensor]:
    """Yield the tensors that an object holds in its attributes, a few levels deep."""
    if isinstance(leaf, Tensor):
        yield leaf
    elif isinstance(leaf, (list, tuple)):
        for item in leaf:
            yield from _tensors_of_object(item, depth)
    elif isinstance(leaf, Mapping):
        for item in leaf.values():
            yield from _tensors_of_object(item, depth)
    elif depth and _is_object(leaf) and hasattr(leaf, "__dict__"):
        for item in vars(leaf).values():
            yield from _tensors_of_object(item, depth - 1)


def _fingerprint(tree: Any) -> list[int]:
    """Identify the tensors that the objects in ``tree`` hold."""
    leaves = [leaf for leaf in pytree.tree_leaves(tree) if _is_object(leaf)]
    return [id(tensor) for leaf in leaves for tensor in _tensors_of_object(leaf)]

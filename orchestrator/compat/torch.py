"""The private parts of PyTorch that this project depends on. No other module touches a private name of torch.

They are checked with torch 2.11, 2.13 and 2.15. A difference between the supported versions belongs in here, in the
function that it concerns; ``tests/unit/compat/test_compat_torch.py`` names whatever a version has removed.
Some parts have modules of their own: ``compat/modules.py``, ``compat/process_groups.py``, ``compat/pipelining.py``, and
``compat/deferred_dynamo.py``, the stand-in for ``torch._dynamo``.

``pytree`` handles nested tuples, lists and dicts; it has no public counterpart that torch's own internals share.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    unset_fake_temporarily,
)
from torch._subclasses.fake_tensor import FakeTensorMode as _FakeTensorMode
from torch.autograd.graph import Node
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.optim import Optimizer
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "CAST",
    "GROUPED_PRODUCT",
    "MOVES_NOTHING",
    "BatchNorm",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "adopt_user_state",
    "as_bytes",
    "changes_step",
    "copies_of",
    "copy_all",
    "count_step",
    "flop_formula",
    "has_run_compiled_code",
    "is_view",
    "is_view_operator",
    "loads_through",
    "multiply",
    "mutates",
    "next_node_number",
    "parameter_of",
    "pytree",
    "reads_number",
    "running_node_number",
    "setting_fake_data",
    "storage_key",
    "unset_fake_temporarily",
    "version_of",
    "watching_compilation",
    "without_fake_tensor_logs",
]


# Tensors and operators


class FakeTensorMode(_FakeTensorMode):
    """torch's mode, which a copy of a model with fake tensors shares with the model.

    torch would copy the mode with each tensor, and with it pointers to storages, which would then be released twice and
    corrupt the heap.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> FakeTensorMode:
        return self


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the elements of a dense tensor as bytes, without a copy if it is contiguous.

    For files, and for backends of process groups, which support few dtypes.
    """
    flat = tensor.contiguous().view(-1)
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # a single element is contiguous with any stride


def version_of(tensor: Tensor) -> int:
    """Return the number of in-place changes that autograd has counted on ``tensor``."""
    return tensor._version


def is_view(tensor: Tensor) -> bool:
    """Return whether autograd treats ``tensor`` as a view of another tensor."""
    return tensor._is_view()


def make_wrapper(kind: type[Tensor], like: Tensor, shape: Sequence[int]) -> Any:
    """Return a tensor of the class ``kind``, of the type of ``like`` and on its device, which has a shape alone."""
    return Tensor._make_wrapper_subclass(kind, shape, dtype=like.dtype, device=like.device)


without_torch_functions: Any = torch._C.DisableTorchFunctionSubclass
"""A context in which no ``__torch_function__`` of a class of tensors is called."""


CAST: Any = torch.ops.aten._to_copy.default
"""The operator that copies a tensor in another type, as autocast does."""


def storage_key(storage: torch.UntypedStorage) -> int:
    """Return a number that identifies ``storage`` for as long as it is alive, also if it has no memory."""
    return int(storage._cdata)


def parameter_of(node: Node) -> Tensor | None:
    """Return the leaf tensor that ``node`` accumulates gradients into; None if it is an inner node."""
    variable: Tensor | None = getattr(node, "variable", None)
    return variable


def next_node_number() -> int:
    """Return the number of the next autograd node that a forward pass in this thread makes; it only grows."""
    number: int = torch.autograd._get_sequence_nr()
    return number


def running_node_number() -> int | None:
    """Return the number of the autograd node that this thread runs in a backward pass; None in a forward pass."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def argument_names(func: Any) -> list[str]:
    """Return the names of the arguments of an operator, in order."""
    return [argument.name for argument in func._schema.arguments]


def written_tensors(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors that a call changes in place; ``operator`` is what ``__torch_dispatch__`` receives."""
    for argument, value in itertools.zip_longest(operator._schema.arguments, args):
        given = kwargs.get(argument.name) if value is None else value
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from (leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, Tensor))


def mutates(operator: Any) -> bool:
    """Return whether an operator, as ``__torch_dispatch__`` receives it, changes one of its arguments."""
    return bool(operator._schema.is_mutable)


def reads_number(operator: Any) -> bool:
    """Return whether an operator, as ``__torch_dispatch__`` receives it, gives Python the value of a tensor."""
    return bool(operator is torch.ops.aten._local_scalar_dense.default)


def is_view_operator(operator: Any) -> bool:
    """Return whether an operator, as ``__torch_dispatch__`` receives it, returns its argument in another shape."""
    return bool(operator.is_view)


def reads_nothing(operator: Any) -> bool:
    """Return whether an operator reads no values of its arguments: a view, or a question about the type of a tensor."""
    return is_view_operator(operator) or operator.namespace == "prim" or operator.overloadpacket in MOVES_NOTHING


CLONE: Any = torch.ops.aten.clone.default
MOVES_NOTHING: Any = frozenset({torch.ops.aten._unsafe_view, torch.ops.aten.empty_like})
"""Operators that read and write nothing, besides views."""


GROUPED_PRODUCT: Any = torch.ops.aten._grouped_mm
"""The operator that multiplies each group of rows by the matrix of another expert."""


def flop_formula(operator: Any) -> Callable[..., int] | None:
    """Return torch's formula for the FLOPs of an operator, as ``__torch_dispatch__`` receives it; None if it has none.

    The formula takes the arguments of the operator, and its result as ``out_val``.
    """
    # Imported here because it brings triton, which takes half a second.
    from torch.utils.flop_counter import flop_registry, sdpa_backward_flop, sdpa_flop

    packet = getattr(operator, "overloadpacket", operator)
    # Torch has formulas for the attention operators of GPUs only, and none for grouped products.
    others: dict[Any, Callable[..., int]] = {
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: sdpa_flop,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: sdpa_backward_flop,
        GROUPED_PRODUCT: _grouped_flop,
    }
    formula: Callable[..., int] | None = flop_registry.get(packet) or others.get(packet)
    return formula


def _grouped_flop(first: Tensor, second: Tensor, *_: Any, **__: Any) -> int:
    return 2 * first.numel() * second.shape[-1]


def has_run_compiled_code() -> bool:
    """Return whether ``torch.compile`` has compiled code in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters["frames"])


_OF_EVERY_TENSOR: dict[type[Tensor], Collection[str]] = {}
"""The attributes that torch gives every tensor of a class."""


def adopt_user_state(target: Tensor, source: Tensor) -> None:
    """Give ``target`` the attributes and the gradient hooks that user code has set on ``source``."""
    if (kind := type(source)) not in _OF_EVERY_TENSOR:
        _OF_EVERY_TENSOR[kind] = {"_is_param", *vars(source.detach())}
    vars(target).update({k: v for k, v in vars(source).items() if k not in _OF_EVERY_TENSOR[kind]})
    target._backward_hooks = source._backward_hooks
    target._post_accumulate_grad_hooks = source._post_accumulate_grad_hooks


def has_gradient_hooks(tensor: Tensor) -> bool:
    """Return whether user code has set a hook on the gradient of ``tensor``."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def changes_step(optimizer: Optimizer) -> bool:
    """Return whether user code has given ``optimizer`` hooks of its step, or a step of its own."""
    return bool(
        "step" in vars(optimizer) or optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    )


def count_step(optimizer: Optimizer) -> None:
    """Let a schedule know of a step that another optimizer has made for ``optimizer``; it would warn otherwise."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def has_accumulation_hooks(tensor: Tensor) -> bool:
    """Return whether user code has set a hook that runs after a gradient has been added to ``tensor.grad``."""
    return bool(tensor._post_accumulate_grad_hooks)


@contextlib.contextmanager
def setting_fake_data() -> Iterator[None]:
    """Let ``Module.to`` and similar methods convert fake parameters in place, by replacing their data.

    torch converts fake parameters with ``torch.utils.swap_tensors``, which refuses tensors that have weak references,
    and the fake mode holds such references. Real parameters are always converted by replacing their data.
    """

    def set_data(parameter: FakeTensor, converted: FakeTensor) -> None:
        parameter.data = converted
        parameter.fake_device = converted.fake_device

    swap = torch.utils.swap_tensors
    torch.utils.swap_tensors = set_data
    try:
        yield
    finally:
        torch.utils.swap_tensors = swap


@contextlib.contextmanager
def refused_in_fork() -> Iterator[list[RuntimeError]]:
    """Collect the errors of backward passes that torch refuses because its threads are those of the parent process."""
    module: Any = torch.autograd
    run, refused = module._engine_run_backward, list[RuntimeError]()

    def noticing(*args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        except RuntimeError as e:
            if "fork-based multiprocessing" in str(e):
                refused.append(e)
            raise

    module._engine_run_backward = noticing
    try:
        yield refused
    finally:
        module._engine_run_backward = run


@contextlib.contextmanager
def without_fake_tensor_logs() -> Iterator[None]:
    """Hide what torch says about fake tensors: a traceback for each operator that fails with them, and a warning.

    The warning says that a fake tensor has no memory. Torch itself asks for it when it copies a parameter.
    """
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled, logger.disabled = logger.disabled, True
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
            yield
    finally:
        logger.disabled = was_disabled


# torch.compile


@contextlib.contextmanager
def watching_compilation(begin: Callable[[bool], None], end: Callable[[], None]) -> Iterator[None]:
    """Call ``begin(again)`` before ``torch.compile`` compiles code in this block, and ``end()`` after it.

    ``again`` tells whether the code has been compiled before, for other inputs or in another mode.
    """
    from torch._dynamo.callback import CallbackArgs, CallbackTrigger, callback_handler

    def on_start(args: CallbackArgs) -> None:
        begin(args.callback_trigger is CallbackTrigger.DYNAMO and not args.compile_id.endswith("/0"))

    def on_end(args: CallbackArgs) -> None:
        end()

    callback_handler.register_start_callback(on_start)
    callback_handler.register_end_callback(on_end)
    try:
        yield
    finally:
        callback_handler.remove_start_callback(on_start)
        callback_handler.remove_end_callback(on_end)


# Arithmetic


def multiply(tensors: Sequence[Tensor], factor: float) -> None:
    """Multiply tensors, dense or sparse, by a number in place; the dense ones of a GPU in few kernels."""
    if dense := [tensor for tensor in tensors if not tensor.is_sparse]:
        torch._foreach_mul_(dense, factor)
    for tensor in tensors:
        if tensor.is_sparse:
            tensor.mul_(factor)


def copy_all(sources: Sequence[Tensor], *, to: Sequence[Tensor]) -> None:
    """Copy each tensor to the one at its place, on a GPU in few kernels."""
    assert len(sources) == len(to)
    if sources:
        torch._foreach_copy_(list(to), list(sources))


def copies_of(tensors: Sequence[Tensor], *, into: Sequence[Tensor] = ()) -> Sequence[Tensor]:
    """Return copies of the tensors: ``into``, earlier ones that are no longer needed, if they are alike."""
    if [_likeness(tensor) for tensor in tensors] != [_likeness(tensor) for tensor in into]:
        return [tensor.clone() for tensor in tensors]
    copy_all(tensors, to=into)
    return into


def _likeness(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


def eager() -> contextlib.AbstractContextManager[None]:
    """Return a context in which compiled code runs as it is written."""
    stance: contextlib.AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
    return stance


# Files


@contextlib.contextmanager
def loads_through(load: Callable[..., Any]) -> Iterator[None]:
    """Let ``load(original, *args, **kwargs)`` make every call of ``torch.load`` in the block."""
    original = torch.load
    torch.load = functools.partial(load, original)
    try:
        yield
    finally:
        torch.load = original

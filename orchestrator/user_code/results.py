"""What the methods of a job have to return: checked at each call, so that an error names the method and the remedy.

The strategies, the checks of the driver and the exports all call these methods. So the class of a job itself checks
their results, and lets the methods that build see the fields as they were configured.
"""

from __future__ import annotations

import functools
import inspect
import math
import numbers
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from orchestrator.user_code.callbacks import Steering
from orchestrator.user_code.errors import JobError, is_of_user
from orchestrator.user_code.steering import AS_CONFIGURED, as_configured

_CLOSURE = "closure"
_MARK = "__checks_result__"
"""An attribute of the functions that check what another one returns."""


@dataclass(frozen=True)
class Built:
    """Where a module of a model comes from.

    Attributes:
        name: its name in the model; empty for the model itself.
        method: the method that has built the model: ``Net.model()``.
        line: the file and the line of that method; empty if it is of a library.
    """

    name: str
    method: str
    line: str


_built: weakref.WeakKeyDictionary[Any, Built] = weakref.WeakKeyDictionary()


def check_results(cls: type, *, except_of: str) -> None:
    """Let the methods of ``cls`` check their results, and let the methods that build see the configured fields.

    Those that the module ``except_of`` defines stay as they are.
    """
    for name in {**_CHECKS, **dict.fromkeys(AS_CONFIGURED)}:
        found = inspect.getattr_static(cls, name)
        function = found.fget if isinstance(found, property) else found
        is_own = hasattr(function, _MARK) or getattr(function, "__module__", None) == except_of
        makes_batches = name == "collate" and not isinstance(found, property)  # a method that is the function itself
        if hasattr(function, "__get__") and not is_own and not makes_batches:
            checking = _checking(name, function)
            setattr(cls, name, property(checking) if isinstance(found, property) else checking)


def _checking(name: str, function: Any) -> Callable[..., Any]:
    """Return ``function``, the method ``name`` of a class, with a check of what it returns."""

    @functools.wraps(function)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = functools.partial(function.__get__(self, type(self)), *args, **kwargs)
        result = as_configured(self, call) if name in AS_CONFIGURED else call()
        outermost = inspect.getattr_static(type(self), name)
        is_outermost = method in (outermost, getattr(outermost, "fget", None))  # others are called by super()
        if is_outermost and name in _CHECKS and (problem := _CHECKS[name](result)) is not None:
            raise JobError(f"job.{name} {problem}")
        if is_outermost and name == "model":
            _note_modules(result, f"{type(self).__name__}.model()", function)
        return result

    setattr(method, _MARK, True)
    return method


def called_method(frame: FrameType) -> str | None:
    """Return the method of a job that a frame calls, such as ``Net.loss``; None if the frame calls none."""
    if frame.f_code.co_filename != __file__ or frame.f_code.co_qualname != "_checking.<locals>.method":
        return None
    return f"{type(frame.f_locals['self']).__name__}.{frame.f_locals['name']}"


def built(module: Any) -> Built | None:
    """Return where a module comes from; None if it is of no model that a job of this process has built."""
    return _built.get(module)


def _note_modules(model: Any, method: str, function: Any) -> None:
    code = getattr(inspect.unwrap(function), "__code__", None)
    line = ""
    if code is not None and is_of_user(code.co_filename):
        line = f"{Path(code.co_filename).name}:{code.co_firstlineno}"
    _built.update((module, Built(name, method, line)) for name, module in model.named_modules())


def kind_of(value: Any) -> str:
    """Return what a value is, in words: ``None``, ``3``, ``the class Net``, ``a tensor of shape (2,)``, ``a tuple``."""
    from torch import Tensor

    if value is None or isinstance(value, (bool, int, float)):
        return repr(value)
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and type {value.dtype}"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def needed_argument(function: Any) -> str | None:
    """Return the name of an argument that has to be given to ``function``; None if it needs none."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of a type that does not tell
        return None
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return next((p.name for p in parameters if p.default is p.empty and p.kind in by_place), None)


def optimizer_problem(result: Any) -> str | None:
    """Return why ``result`` is no optimizer that can be used, as a predicate; None if it is one."""
    return _stepping_problem(
        result,
        ("param_groups", "step", "zero_grad"),
        wanted="a torch.optim.Optimizer of the parameters",
        remedy="another optimizer, such as AdamW",
        given=_CLOSURE,
    )


def needs_closure(optimizer: Any) -> bool:
    """Return whether the optimizer itself asks for the loss and the gradients, as ``LBFGS`` does."""
    return needed_argument(optimizer.step) == _CLOSURE


def _scheduler_problem(result: Any) -> str | None:
    from torch.optim.lr_scheduler import ReduceLROnPlateau

    if result is None or isinstance(result, ReduceLROnPlateau):
        return None
    return _stepping_problem(
        result,
        ("step", "state_dict"),
        wanted="an LRScheduler of the optimizer, or None for a constant rate",
        remedy="a schedule over the steps, such as CosineAnnealingLR(optimizer, steps)",
    )


def _stepping_problem(
    result: Any, attributes: Iterable[str], *, wanted: str, remedy: str, given: str | None = None
) -> str | None:
    if isinstance(result, type) or not all(hasattr(result, name) for name in attributes):
        return f"returns {kind_of(result)}; return {wanted}"
    if (argument := needed_argument(result.step)) not in (None, given):
        return (
            f"returns {kind_of(result)}, whose step() needs the argument {argument!r}, which the run does not have; "
            f"use {remedy}"
        )
    return None


def _is_module(value: Any) -> bool:
    from torch import nn

    return isinstance(value, nn.Module)


def _is_real_tensor(value: Any) -> bool:
    from torch import Tensor

    return isinstance(value, Tensor) and value.is_floating_point()


def _is_weight(value: Any) -> bool:
    from torch import Tensor

    if isinstance(value, Tensor):
        return value.ndim == 0 and not value.is_complex()  # its value may be on a GPU, or nowhere
    return value is None or (isinstance(value, numbers.Real) and 0 <= float(value) < math.inf)


def _is_list(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, (str, Mapping)) and not _is_real_tensor(value)


def _expects(wanted: str, accepts: Callable[[Any], bool]) -> Callable[[Any], str | None]:
    return lambda result: None if accepts(result) else f"returns {kind_of(result)}; return {wanted}"


_CHECKS: Mapping[str, Callable[[Any], str | None]] = {
    "model": _expects("an nn.Module", _is_module),
    "loss": _expects("a scalar tensor of floats, the mean loss of the batch", _is_real_tensor),
    "parameter_groups": _expects("a list of parameters, or of dicts with parameters under 'params'", _is_list),
    "optimizer": optimizer_problem,
    "stages": _expects("a list of modules, or None", lambda v: v is None or _is_list(v) or _is_module(v)),
    "scheduler": _scheduler_problem,
    "collate": _expects("a function that makes a batch of samples, or None", lambda v: v is None or callable(v)),
    "weight": _expects("the number of units in the batch, at least 0, as a number or a scalar tensor", _is_weight),
    "metric_objects": _expects("a dict of metrics by name", lambda v: isinstance(v, Mapping)),
    "tokens_per_sample": _expects(
        "a number above 0, or None", lambda v: v is None or (isinstance(v, numbers.Real) and 0 < float(v) < math.inf)
    ),
    "on_evaluation": _expects("a Steering, or None to change nothing", lambda v: v is None or isinstance(v, Steering)),
    "check": _expects("nothing, and raise a ValueError that says what is wrong", lambda v: v is None),
}
"""By the name of a method: returns what is wrong with its result, as a predicate, or None."""

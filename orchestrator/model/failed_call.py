"""The call of a model or of a job that has led to an error in code of others, and its arguments."""

from __future__ import annotations

import contextlib
import itertools
import traceback
from collections.abc import Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from orchestrator.compat.modules import called_module
from orchestrator.model.batch import tensors_in
from orchestrator.user_code.errors import error_text, is_of_user, is_own_error, user_frames
from orchestrator.user_code.own_errors import OwnError, causes, may_come_again, own_error
from orchestrator.user_code.results import Built, built, called_method

_MOST_TENSORS = 4
_MOST_CHARACTERS = 100
_MOST_FRAMES = 3
_WRAPPERS = (f"{__package__.partition('.')[0]}.", "torch.nn.parallel.")


def failed_call(error: BaseException) -> OwnError | None:
    """Return what is known of an error of the user's code, or of libraries that it uses; None if it is neither.

    The module of the model that has raised it is named, with its inputs, if no code of the user was below its call.
    """
    own = own_error(error)
    for cause in causes(error):
        place, below = _called(cause, with_line=own is None)
        if place and own is not None:
            return replace(own, place=f"{own.place}; {place}")
        if place:
            return OwnError(place=place, frames=_shown(below), comes_again=may_come_again(error))
    if own is None:
        of_libraries = (user_frames(cause) for cause in causes(error) if not is_own_error(cause))
        entries = next(filter(None, of_libraries), [])
        own = OwnError(place="", frames=_shown(entries), comes_again=False) if entries else None
    return own


def error_with_place(error: BaseException, *, most: int = 300) -> str:
    """Return the type and the first ``most`` characters of the text of an error, in one line, and its place."""
    text, own = " ".join(error_text(error).split())[:most], failed_call(error)
    return text if own is None or not own.place else f"{text} ({own.place})"


def _called(error: BaseException, *, with_line: bool) -> tuple[str, list[TracebackType]]:
    """Return the innermost call, empty if code of the user is below it, and the entries of the traceback below it.

    Args:
        with_line: whether to name the line of the method that has built the model.
    """
    modules: list[nn.Module] = []
    method, call, below = "", "", list[TracebackType]()
    entry = error.__traceback__
    while entry is not None:
        below.append(entry)
        if (called := called_module(entry.tb_frame)) is not None:
            module, inputs = called
            if not type(module).__module__.startswith(_WRAPPERS):
                modules.append(module)
                call, below = _call(modules, inputs, with_line=with_line), []
        elif (name := called_method(entry.tb_frame)) is not None:
            method, modules, call, below = name, [], "", []
        elif is_of_user(entry.tb_frame.f_code.co_filename):
            method, call = "", ""
        entry = entry.tb_next
    text = ": ".join(filter(None, (method, call)))
    return (f"in {text}" if text else ""), below


def _call(modules: list[nn.Module], inputs: tuple[Any, Mapping[str, Any]], *, with_line: bool) -> str:
    """Return the innermost of the called modules, by its name in the model, and the tensors given to it."""
    module = modules[-1]
    if (of := built(module)) is None:  # by its name in the outermost one
        of = Built(next((name for name, other in modules[0].named_modules() if other is module), ""), "", "")
    line = f", {of.line}" if with_line and of.line else ""
    place = f"module '{of.name}'" if of.name else ""
    place = " of ".join(filter(None, (place, f"{of.method}{line}")))
    tensors = [*itertools.islice(tensors_in(inputs), _MOST_TENSORS)]
    given = ", ".join(map(_tensor, tensors))
    return ": ".join(filter(None, (place, _kind(module)))) + (f", given {given}" if given else "")


def _kind(module: nn.Module) -> str:
    settings = "..." if next(module.children(), None) is not None else ""
    with contextlib.suppress(Exception):  # of a method of the user
        settings = module.extra_repr() or settings
    if len(settings) > _MOST_CHARACTERS or "\n" in settings:
        settings = f"{settings.partition(chr(10))[0][:_MOST_CHARACTERS]}..."
    return f"{type(module).__name__}({settings})"


def _tensor(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _shown(entries: list[TracebackType]) -> str:
    return "".join(line for entry in entries[-_MOST_FRAMES:] for line in traceback.format_tb(entry, limit=1))

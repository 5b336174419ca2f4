"""An error of the code of the user: where it was raised, and whether it would come again. Imports no torch."""

from __future__ import annotations

import linecache
import re
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.user_code.errors import is_of_user, own_frames, user_frames

_OF_THE_CODE = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError, NotImplementedError),
    *(RecursionError, SyntaxError, TypeError, ValueError, Warning),
)
"""Built-in errors that code raises for equal inputs again, which a rank that continues from the same step has."""
_TEXTS_OF_TORCH = re.compile(
    "shapes cannot be multiplied|must match the size of tensor|is invalid for input of size|[Ss]izes of tensors must"
    "|[Ss]ize mismatch|shape mismatch|[Ee]xpected (?:size|scalar type|tensor|input|target|object|floating|long|all "
    "tensors|m1 and m2|query|hidden)|same dtype|same device|must have (?:the )?same|should be the same"
    "|[Gg]iven groups|does not require grad|through the graph a second time|modified by an inplace operation"
    "|can only be created for scalar|[Dd]imension out of range|index out of|out of bounds|not implemented for"
    "|view size is not compatible|can't be cast|cannot reshape|[Dd]imension|expanded size|out=|inconsistent tensor size"
    r"|[Bb]oolean value of Tensor|a leaf Variable that requires grad|target tensor expected|should contain \d+ elements"
    r"|[Ee]xpected \d+D|batch_size|does(?: not|n't) match"
)
"""What torch says of tensors that do not fit, in a ``RuntimeError``, which may have any other cause too."""
_FRAME = re.compile(r'^  File "(?P<file>[^"\n]+)", line (?P<line>\d+), in .*\n(?:    .*\n?)?', re.MULTILINE)
_MOST_CHARACTERS = 120


@dataclass(frozen=True)
class OwnError:
    """An error that code of the user has raised, or a library that it has called. Can be pickled.

    Attributes:
        place: the file, the line and its text: ``train.py:34: x = batch["label"]``.
        frames: the frames of the user's code, as a traceback shows them.
        comes_again: whether another attempt would most likely end in the same way.
    """

    place: str
    frames: str
    comes_again: bool


def own_error(error: BaseException) -> OwnError | None:
    """Return what is known of an error of the code of the user; None if no code of the user was in it."""
    chain = list(causes(error))
    for cause in chain:
        known: OwnError | None = getattr(cause, "own_error", None)  # of a loader process
        if known is not None:
            return known
    raised = [cause for cause in chain if own_frames(cause) and user_frames(cause)]  # below all of this package
    for cause in raised or filter(own_frames, chain):
        entries = own_frames(cause)
        code = entries[-1].tb_frame.f_code
        return OwnError(
            place=_place(code.co_filename, entries[-1].tb_lineno, entries[-1].tb_frame.f_globals),
            frames="".join(line for entry in entries for line in traceback.format_tb(entry, limit=1)),
            comes_again=bool(raised) and may_come_again(error),
        )
    return None


def own_error_in(text: str) -> OwnError | None:
    """Return what the text of a traceback says of the code of the user; None if that has no frame in it."""
    frames = [(m[0], m) for m in _FRAME.finditer(text) if is_of_user(m["file"])]
    if not frames:
        return None
    last = frames[-1][1]
    place = _place(last["file"], int(last["line"]))
    return OwnError(place=place, frames="".join(frame for frame, _ in frames), comes_again=True)


def may_come_again(error: BaseException) -> bool:
    """Return whether nothing outside of the code is a likely cause of the error."""
    return not any(map(_may_pass, causes(error)))


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the error, the one that it was raised from or in the handling of, and so on."""
    cause: BaseException | None = error
    seen: set[int] = set()
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)


def _may_pass(error: BaseException) -> bool:
    """Return whether ``error`` may have a cause outside of the code: a store, a network, the memory, a device."""
    module = type(error).__module__
    if type(error) is RuntimeError:
        return _TEXTS_OF_TORCH.search(str(error)) is None
    if module.partition(".")[0] == __package__.partition(".")[0]:
        return False  # it only says where another one was raised
    return module != "builtins" or not isinstance(error, _OF_THE_CODE)


def _place(file: str, number: int, module: dict[str, Any] | None = None) -> str:
    line = linecache.getline(file, number, module).strip()
    text = line if len(line) <= _MOST_CHARACTERS else f"{line[:_MOST_CHARACTERS]}..."
    return f"{Path(file).name}:{number}" + (f": {text}" if text else "")

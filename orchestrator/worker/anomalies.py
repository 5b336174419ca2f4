"""NaN in backward passes, and the line of the forward pass that each belongs to: ``train.detect_anomaly``."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from orchestrator.user_code.own_errors import OwnError, own_error_in

_TOLD = "Error detected in "
_RETURNED_NAN = re.compile(r"Function '(\w+)' returned nan values")


class AnomalyError(ArithmeticError):
    """A function of a backward pass has returned NaN.

    Attributes:
        own_error: where the user's code has called the operation in the forward pass; None if it did not.
    """

    def __init__(self, function: str, own_error: OwnError | None):
        super().__init__(function, own_error)
        self.function = function
        self.own_error = own_error

    def __str__(self) -> str:
        return f"{self.function} returned NaN in the backward pass"


@contextlib.contextmanager
def detecting_anomalies() -> Iterator[None]:
    """Let torch remember where each operation was called.

    Raises:
        AnomalyError: a function of a backward pass, in any thread, returns NaN.
    """
    told: list[str] = []
    with warnings.catch_warnings():
        show = warnings.showwarning

        def note(message: Warning | str, *args: Any, **options: Any) -> None:
            if str(message).startswith(_TOLD):  # and then the traceback of the forward pass
                told.append(str(message))
            else:
                show(message, *args, **options)

        warnings.filterwarnings("always", f"{_TOLD}.*")
        warnings.showwarning = note
        with torch.autograd.set_detect_anomaly(True):
            try:
                yield
            except RuntimeError as e:
                if (found := _RETURNED_NAN.search(str(e))) is None:
                    raise
                raise AnomalyError(found[1], own_error_in(told[-1] if told else "")) from e

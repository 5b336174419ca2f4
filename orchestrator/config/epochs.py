"""Intervals in epochs, such as ``train.eval_every='1 epoch'``, which become steps before a run starts."""

from __future__ import annotations

import re


class Epochs(int):
    """A number of steps that is not known yet. As a number, it is 1.

    Attributes:
        number: of epochs.
    """

    number: float

    def __new__(cls, number: float) -> Epochs:
        """Return ``number`` epochs."""
        made = super().__new__(cls, 1)
        made.number = number
        return made

    def __getnewargs__(self) -> tuple[float]:  # type: ignore[override]
        """Return what a copy is made of."""
        return (self.number,)

    def __str__(self) -> str:
        return f"{self.number:g} epoch{'' if self.number == 1 else 's'}"

    __repr__ = __str__

    @classmethod
    def read(cls, text: str) -> Epochs | None:
        """Return what ``1 epoch`` or ``0.5 epochs`` stands for; None for another text."""
        match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*epochs?\s*", text)
        number = float(match[1]) if match else 0
        return cls(number) if number > 0 else None

"""The step at which the training of this process is, for losses that change with it."""

from __future__ import annotations

_step = 1  # of all threads: replicas and backward passes have threads of their own


def current_step() -> int:
    """Return the step that is being made, from 1, for example in ``Job.loss`` and ``Job.training_step``.

    It is the same on all ranks of a synchronous strategy, and after a resume or a failure. In an evaluation, it is the
    step after which that is made. A model that is compiled should not call this, because it would be compiled again for
    each number.
    """
    return _step


def set_current_step(step: int) -> None:
    """Let :func:`current_step` return ``step``."""
    global _step
    _step = step

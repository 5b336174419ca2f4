"""Python stacks of the threads of this process, which show where a rank hangs."""

from __future__ import annotations

import sys
import threading
import traceback

from orchestrator.protocol.messages import Stacks

_WAITS_IN = ("/torch/distributed/", "/torch/autograd/")
"""The innermost frame of a rank that waits for others is in a collective operation, or in the backward pass, which
averages gradients."""


def all_stacks(training_thread: int | None) -> Stacks:
    """Return the Python stacks of all threads, the training thread first.

    Args:
        training_thread: its identifier, as ``threading.get_ident`` returns it; None if it has not started.
    """
    names = {t.ident: t.name for t in threading.enumerate()}
    frames = sys._current_frames()
    parts = []
    for ident in sorted(frames, key=lambda i: i != training_thread):
        role = "training thread" if ident == training_thread else f"thread {names.get(ident, ident)}"
        parts.append(f"{role}:\n{''.join(traceback.format_stack(frames[ident]))}")
    training = frames.get(training_thread) if training_thread is not None else None
    waiting = training is not None and any(part in training.f_code.co_filename for part in _WAITS_IN)
    return Stacks(text="\n".join(parts), waiting=waiting)

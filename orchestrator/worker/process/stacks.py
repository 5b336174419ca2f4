"""Python stacks of the threads of this process, which show where a rank hangs."""

from __future__ import annotations

import sys
import threading
import traceback
import zlib
from collections.abc import Callable

from orchestrator.protocol.flight import enqueued_in
from orchestrator.protocol.messages import FlightRecord, Stacks

_WAITS_IN = (
    *("/torch/distributed/", "/torch/autograd/", "/orchestrator/strategies/", "/orchestrator/state/transport.py"),
    *("/orchestrator/worker/control/rendezvous.py", "/orchestrator/compat/enqueue_gate.py"),
)
"""The innermost frame of a rank that waits for others is in a collective operation, in the backward pass, which
averages gradients, in a strategy that waits for a message or a lock, or in the wait before the first of these. The code
of a job is in none of these."""


def all_stacks(training_thread: int | None, *, flight: FlightRecord | None) -> Stacks:
    """Return the Python stacks of all threads, the training thread first.

    Args:
        training_thread: its identifier, as ``threading.get_ident`` returns it; None if it has not started.
        flight: what this process has enqueued with NCCL; None with gloo.
    """
    names = {t.ident: t.name for t in threading.enumerate()}
    frames = sys._current_frames()
    parts = []
    for ident in sorted(frames, key=lambda i: i != training_thread):
        role = "training thread" if ident == training_thread else f"thread {names.get(ident, ident)}"
        parts.append(f"{role}:\n{''.join(traceback.format_stack(frames[ident]))}")
    return Stacks(text="\n".join(parts), waiting=is_waiting(training_thread), flight=flight)


def is_waiting(training_thread: int | None) -> bool:
    """Return whether the training thread, given as for :func:`all_stacks`, seems to wait for other ranks."""
    frame = None if training_thread is None else sys._current_frames().get(training_thread)
    return frame is not None and any(part in frame.f_code.co_filename for part in _WAITS_IN)


def flight_record_of(read: Callable[[], str], *, since_ns: int, world_size: int) -> FlightRecord | None:
    """Return what a rank has enqueued; None if the record cannot be read.

    Args:
        read: returns the dump of the flight recorder.
        since_ns: as for :func:`enqueued_in`, like ``world_size``.
    """
    try:
        dump = read()
        return FlightRecord(
            enqueued=enqueued_in(dump, since_ns=since_ns, world_size=world_size),
            dump=zlib.compress(dump.encode(), level=1),
        )
    except Exception:  # its format may change with torch
        traceback.print_exc()
        return None

"""Injection of the faults that ``recovery.chaos`` plans for a worker."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterable

from orchestrator.planning.faults import Fault

_LONG_S = 10**6


def inject_fault(faults: Iterable[Fault], *, rank: int, phase: str, step: int) -> None:
    """Inject the faults that are planned for this rank, phase and step.

    Raises:
        RuntimeError: the planned fault is an exception.
    """
    for fault in faults:
        if (fault.rank, fault.phase, fault.step) == (rank, phase, step):
            print(f"recovery.chaos: {fault.kind} at {time.time():.3f}", flush=True)
            _inject(fault)


def _inject(fault: Fault) -> None:
    match fault.kind:
        case "raise":
            raise RuntimeError(f"planned by recovery.chaos: {fault}")
        case "exit":
            os._exit(1)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "segv":
            ctypes.string_at(0)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "sleep":
            time.sleep(_LONG_S)
        case "gil":
            ctypes.PyDLL(None).sleep(_LONG_S)

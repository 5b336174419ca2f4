"""The machine of this process, for records that are compared."""

from __future__ import annotations

import os
import platform
import socket
from pathlib import Path


def machine_facts() -> dict[str, str]:
    """Return the name of the machine, its processor, and the number of cores that this process may use."""
    return {"host": socket.gethostname(), "processor": processor(), "cores": str(len(os.sched_getaffinity(0)))}


def processor() -> str:
    """Return the model of the processor; empty if it is not known."""
    try:
        with Path("/proc/cpuinfo").open() as lines:
            return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    except OSError:
        return platform.processor()

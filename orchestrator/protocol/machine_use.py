"""What a run and others have used of the CPUs and the GPU of a worker, and whether that makes its speed doubtful."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.protocol.metrics import summary_value

OTHERS_CPU_PCT, IDLE_CPU_PCT, OTHERS_GPU_PCT = "others_cpu_pct", "idle_cpu_pct", "others_gpu_pct"
"""Keys of the summary of a run: of the node, or of the GPU, of which others used the largest part."""

SHARED_FROM_PCT = 10.0


@dataclass(frozen=True, kw_only=True)
class MachineUse:
    """CPU seconds on a node in an interval, and the use of a worker's GPU in it.

    Attributes:
        own_s: the seconds of a process and of the processes that it has started.
        busy_s: the seconds of all processes.
        idle_s: those that no process used.
        others_gpu_pct: the share of the time in which other processes used the GPU; None if that is unknown.
    """

    own_s: float
    busy_s: float
    idle_s: float
    others_gpu_pct: float | None = None


def describe_sharing(summary: Mapping[str, Any]) -> str | None:
    """Return what other programs used while a run was timed; None if not so much that it was slowed.

    CPUs are taken from a run only if less of them stood idle than others used.
    """
    cpu, idle, gpu = (summary_value(summary, key) or 0.0 for key in (OTHERS_CPU_PCT, IDLE_CPU_PCT, OTHERS_GPU_PCT))
    parts = [f"{cpu:.0f}% of the CPUs"] if cpu >= max(SHARED_FROM_PCT, idle) else []
    parts += [f"{gpu:.0f}% of a GPU"] if gpu >= SHARED_FROM_PCT else []
    return " and ".join(parts) or None

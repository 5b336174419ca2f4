"""The share of the time of a run in which it trains steps that last, with failures at a mean rate. Pure.

A failure costs the recovery and the steps since the last state that can be recovered: half of the time between two of
them. Young, 1974, and Daly, 2006, give the interval at which checkpoints and lost steps cost least together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

DEVICE_HOURS = 50_000.0
"""The mean hours between the failures of one device. Llama 3 (arXiv:2407.21783): 419 interruptions of 16,384 GPUs that
were not planned, in 54 days, which is one in 50,700 hours."""


@dataclass(frozen=True, kw_only=True)
class Reliability:
    """What failures cost.

    Attributes:
        device_hours: the mean hours between the failures of one device.
        recovery_s: from a failure to the next step, without the steps that are made again.
        stall_s: how long training waits for a checkpoint.
        interval_s: the time between two checkpoints; None for the best.
        copied_s: the time between two states that survivors or neighbours have in memory; None if there are none, and
            each failure goes back to a checkpoint.
    """

    device_hours: float = DEVICE_HOURS
    recovery_s: float
    stall_s: float
    interval_s: float | None = None
    copied_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """The result.

    Attributes:
        share: of the time in which steps are trained that last.
        failure_s: the mean time between two failures of the run.
        interval_s: the time between two checkpoints.
    """

    share: float
    failure_s: float
    interval_s: float


def goodput(devices: int, reliability: Reliability) -> Goodput:
    """Return the goodput of a run on so many devices."""
    r = reliability
    failure_s = r.device_hours * 3600 / devices
    interval_s = r.interval_s or best_interval_s(failure_s, r.stall_s)
    lost_s = r.recovery_s + (interval_s if r.copied_s is None else r.copied_s) / 2
    useful = (1 - r.stall_s / (interval_s + r.stall_s)) / (1 + lost_s / failure_s)
    return Goodput(share=useful, failure_s=failure_s, interval_s=interval_s)


def best_interval_s(failure_s: float, stall_s: float) -> float:
    """Return the time between checkpoints at which they and the steps that failures undo cost least (Young, 1974)."""
    return math.sqrt(2 * stall_s * failure_s)

"""The faults to inject, as written in ``recovery.chaos``: a kind, a step, a rank and a phase."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from dataclasses import dataclass

KINDS = {
    "raise": "an exception in the training thread",
    "exit": "os._exit(1)",
    "kill": "SIGKILL",
    "segv": "a segmentation fault",
    "stop": "SIGSTOP: the process is stopped",
    "sleep": "the training thread sleeps forever",
    "gil": "the training thread sleeps forever while it holds the interpreter lock",
}
PHASES = ("join", "connect", "build", "train", "eval", "checkpoint", "end")
_DRAWN = re.compile(r"random:(?P<count>[1-9]\d*)")
_FAULT = re.compile(r"(?P<kind>\w+)@(?P<step>\d+):(?P<rank>\d+)(:(?P<phase>\w+))?")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault on one rank: in phase ``train`` it occurs during ``step``, in other phases when ``step`` was the last."""

    kind: str
    step: int
    rank: int
    phase: str = "train"

    def __str__(self) -> str:
        return f"{self.kind}@{self.step}:{self.rank}" + ("" if self.phase == "train" else f":{self.phase}")


def parse_entry(text: str, *, seed: int, steps: int, num_ranks: int) -> tuple[Fault, ...]:
    """Return the faults that one entry of ``recovery.chaos`` names.

    ``kill@40:1`` names one fault; ``random:3`` names three, drawn with ``seed``.

    Raises:
        ValueError: the entry is malformed, or names a fault that cannot occur; the message says why.
    """
    if drawn := _DRAWN.fullmatch(text):
        count = int(drawn["count"])
        if count >= steps:
            raise ValueError(f"{text}: a run of {steps} steps has room for {steps - 1} faults; give a lower number")
        return draw(count, seed=seed, steps=steps, num_ranks=num_ranks)
    fault = parse(text)
    if fault.rank >= num_ranks:
        raise ValueError(f"{text}: no rank {fault.rank} among {num_ranks} workers; ranks begin at 0")
    if fault.step > steps:
        raise ValueError(f"{text}: the run has {steps} steps; give an earlier one, or raise train.steps")
    return (fault,)


def draw(count: int, *, seed: int, steps: int, num_ranks: int) -> tuple[Fault, ...]:
    """Draw faults of any kind on any rank, each at a different step after the first. The seed determines them."""
    generator = random.Random(seed)
    return tuple(
        Fault(kind=generator.choice(list(KINDS)), step=step, rank=generator.randrange(num_ranks))
        for step in sorted(generator.sample(range(2, steps + 1), count))
    )


def parse(text: str) -> Fault:
    """Parse one fault, such as ``kill@40:1`` or ``stop@40:0:eval``.

    Raises:
        ValueError: it is malformed; the message says how.
    """
    match = _FAULT.fullmatch(text)
    if match is None:
        raise ValueError(
            f"{text}: expected <kind>@<step>:<rank> or <kind>@<step>:<rank>:<phase>, as in kill@40:1, or random:<count>"
        )
    kind, phase = match["kind"], match["phase"] or "train"
    if kind not in KINDS:
        raise ValueError(f"{text}: unknown kind; valid: {', '.join(KINDS)}")
    if phase not in PHASES:
        raise ValueError(f"{text}: unknown phase; valid: {', '.join(PHASES)}")
    return Fault(kind=kind, step=int(match["step"]), rank=int(match["rank"]), phase=phase)


def without_next(faults: Iterable[Fault], rank: int) -> tuple[Fault, ...]:
    """Return ``faults`` without the first one on ``rank``, which has occurred."""
    remaining = list(faults)
    on_rank = [f for f in remaining if f.rank == rank]
    if on_rank:
        remaining.remove(min(on_rank, key=lambda f: f.step))
    return tuple(remaining)

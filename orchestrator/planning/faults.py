"""Faults to rehearse, as written in ``recovery.chaos``: what, at which step, on which rank, in which phase."""

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
    "stop": "SIGSTOP: the process stands still",
    "sleep": "the training thread sleeps for ever",
    "gil": "the training thread sleeps for ever and lets no other thread run",
}
PHASES = ("join", "build", "train", "eval", "checkpoint", "end")
_DRAWN = re.compile(r"random:(?P<count>[1-9]\d*)")
_WORD = re.compile(r"(?P<kind>\w+)@(?P<step>\d+):(?P<rank>\d+)(:(?P<phase>\w+))?")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """In phase ``train`` it strikes while ``step`` is worked on, in the others when that is the last step done."""

    kind: str
    step: int
    rank: int
    phase: str = "train"

    def __str__(self) -> str:
        return f"{self.kind}@{self.step}:{self.rank}" + ("" if self.phase == "train" else f":{self.phase}")


def planned(word: str, *, seed: int, steps: int, num_ranks: int) -> tuple[Fault, ...]:
    """The fault that a word of ``recovery.chaos`` names, or (``random:3``) so many that are drawn from the seed.

    Raises:
        ValueError: it names none that can strike; the text says why.
    """
    if drawn := _DRAWN.fullmatch(word):
        count = int(drawn["count"])
        if count >= steps:
            raise ValueError(f"{word}: a run of {steps} steps has room for {steps - 1}; give a lower number")
        return draw(count, seed=seed, steps=steps, num_ranks=num_ranks)
    fault = parse(word)
    if fault.rank >= num_ranks:
        raise ValueError(f"{word}: no rank {fault.rank} among {num_ranks} workers; ranks begin at 0")
    if fault.step > steps:
        raise ValueError(f"{word}: the run has {steps} steps; give an earlier one, or raise train.steps")
    return (fault,)


def draw(count: int, *, seed: int, steps: int, num_ranks: int) -> tuple[Fault, ...]:
    """Faults of any kind on any rank, each at another step after the first; the same ones for the same seed."""
    chance = random.Random(seed)
    return tuple(
        Fault(kind=chance.choice(list(KINDS)), step=step, rank=chance.randrange(num_ranks))
        for step in sorted(chance.sample(range(2, steps + 1), count))
    )


def parse(word: str) -> Fault:
    """``kill@40:1`` or ``stop@40:0:eval``.

    Raises:
        ValueError: it is none; the text says what is wrong.
    """
    match = _WORD.fullmatch(word)
    if match is None:
        raise ValueError(
            f"{word}: expected <kind>@<step>:<rank> or <kind>@<step>:<rank>:<phase>, as in kill@40:1, or random:<count>"
        )
    kind, phase = match["kind"], match["phase"] or "train"
    if kind not in KINDS:
        raise ValueError(f"{word}: unknown kind; valid: {', '.join(KINDS)}")
    if phase not in PHASES:
        raise ValueError(f"{word}: unknown phase; valid: {', '.join(PHASES)}")
    return Fault(kind=kind, step=int(match["step"]), rank=int(match["rank"]), phase=phase)


def without_next(faults: Iterable[Fault], rank: int) -> tuple[Fault, ...]:
    """``faults`` without the next one of ``rank``, which has struck."""
    left = list(faults)
    planned = [f for f in left if f.rank == rank]
    if planned:
        left.remove(min(planned, key=lambda f: f.step))
    return tuple(left)

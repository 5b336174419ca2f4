"""The spans of workers on several hosts, on one clock. Pure.

The clocks of two hosts differ, and the activations and gradients that they exchange show by how much. No action starts
before its input has arrived, so every message limits the difference of the two clocks from one side, and every message
in the other direction from the other side. The tightest limits leave a range of two network delays: a pipeline begins
and ends with workers that wait for a message.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

from orchestrator.timeline.spans import ActionKind, Span


def aligned(workers: Sequence[Sequence[Span]]) -> list[list[Span]]:
    """Return the spans of the ``workers`` of a pipeline, by ``pp_rank``, in the time of the first worker.

    Clocks that agree with every message are left alone, as on one host.
    """
    offset_s, on_one_clock = 0.0, [list(workers[0])]
    for before, after in itertools.pairwise(workers):
        offset_s += clock_offset_s(before, after)
        on_one_clock.append([replace(s, start=s.start - offset_s, end=s.end - offset_s) for s in after])
    return on_one_clock


def clock_offset_s(one: Sequence[Span], other: Sequence[Span]) -> float:
    """Return how far the clock of the ``other`` worker is ahead of ``one``'s, in seconds; 0 if it may be right.

    Otherwise, it is the middle of the range that the messages between the two allow.
    """
    most, least = _shortest_delay_s(one, other), -_shortest_delay_s(other, one)
    if least <= 0 <= most or math.isinf(most) or math.isinf(least):
        return 0.0
    return (least + most) / 2


def _shortest_delay_s(sender: Sequence[Span], receiver: Sequence[Span]) -> float:
    """Return the shortest time from an action of ``sender`` to one that needs its result; infinite if none does."""
    ends = {("B" if s.kind == "I" else s.kind, s.stage, s.microbatch): s.end for s in sender}
    delays_s = [span.start - ends[need] for span in receiver if (need := _input_of(span)) in ends]
    return min(delays_s, default=math.inf)


def _input_of(span: Span) -> tuple[ActionKind, int, int] | None:
    """Return kind, stage and micro-batch of the action at another stage that ``span`` needs; B stands for I too."""
    match span.kind:
        case "F":
            return "F", span.stage - 1, span.microbatch
        case "B" | "I":
            return "B", span.stage + 1, span.microbatch
    return None

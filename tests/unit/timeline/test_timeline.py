"""What is told of a step from its spans: bubbles, busy shares, and the trace."""

import itertools
from collections import defaultdict

import pytest

from orchestrator.timeline import ActionKind, Span, Timeline, bubble, trace


def span(kind: ActionKind, stage: int, start: float, end: float, microbatch: int = 0) -> Span:
    return Span(kind=kind, stage=stage, microbatch=microbatch, start=start, end=end)


TWO_STAGES = [
    [span("F", 0, 100.0, 101.0), span("B", 0, 106.0, 108.0)],
    [span("F", 1, 101.0, 103.0), span("B", 1, 103.0, 106.0)],
]
TWO_STAGES_QUICKER = [
    [span("F", 0, 100.5, 101.0), span("B", 0, 104.0, 104.5)],
    [span("F", 1, 101.0, 102.0), span("B", 1, 102.0, 104.0)],
]
TIMELINE = Timeline(step=7, replicas=[TWO_STAGES, TWO_STAGES_QUICKER], theoretical_bubble=0.5)


def test_bubble_is_what_is_left_of_the_time_of_all_workers() -> None:
    assert bubble(TWO_STAGES) == pytest.approx(1 - 8 / 16)


def test_replicas_are_measured_apart_and_averaged() -> None:
    """Each from its own first start to its own last end."""
    assert TIMELINE.bubble == pytest.approx(((1 - 8 / 16) + (1 - 4 / 8)) / 2)
    assert TIMELINE.stage_busy() == {0: pytest.approx((3 / 8 + 1 / 4) / 2), 1: pytest.approx((5 / 8 + 3 / 4) / 2)}


def test_a_worker_with_two_stages_has_a_share_for_each() -> None:
    workers = [[span("F", 0, 0.0, 1.0), span("F", 3, 2.0, 4.0)], [span("F", 1, 1.0, 1.5), span("F", 2, 1.5, 2.0)]]
    shares = Timeline(step=1, replicas=[workers], theoretical_bubble=0.0).stage_busy()
    assert shares == {0: 0.25, 1: 0.125, 2: 0.125, 3: 0.5}


def test_trace_has_a_row_for_each_worker_without_overlaps() -> None:
    traced = trace(TIMELINE)["traceEvents"]
    rows = defaultdict(list)
    for event in traced:
        if event["ph"] == "X":
            rows[event["pid"], event["tid"]].append(event)
    assert rows.keys() == {(0, 0), (0, 1), (1, 0), (1, 1)}
    for events in rows.values():
        assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in itertools.pairwise(events))
    first, last = rows[0, 0]
    assert (first["name"], first["ts"], first["dur"], first["args"]["stage"]) == ("F0", 0.0, 1e6, 0)
    assert (last["name"], last["ts"], last["dur"]) == ("B0", 6e6, 2e6)
    names = {(e["pid"], e.get("tid")): e["args"]["name"] for e in traced if e["ph"] == "M"}
    assert names[1, None] == "replica 1"
    assert names[1, 1] == "stage 1"

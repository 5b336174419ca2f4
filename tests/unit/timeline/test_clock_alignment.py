"""The clocks of two hosts are compared by the messages of a step."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from orchestrator.timeline import Action, ActionKind, Span, aligned, clock_offset_s, simulate

LAYOUTS = {"a stage each": [[0], [1], [2]], "a loop": [[0, 3], [1, 4], [2, 5]], "a V": [[0, 5], [1, 4], [2, 3]]}
"""The stages of each worker."""


def spans(layout: Sequence[Sequence[int]], *, split_backward: bool) -> list[list[Span]]:
    """All forward passes, then all backward passes, of four micro-batches."""
    backward: tuple[ActionKind, ...] = ("I", "W") if split_backward else ("B",)
    orders: list[list[Action]] = []
    for stages in layout:
        order: list[Action] = [("F", stage, i) for stage in stages for i in range(4)]
        order += [(kind, stage, i) for stage in reversed(stages) for i in range(4) for kind in backward]
        orders.append(order)
    return simulate(orders)


def shifted(worker: Sequence[Span], by_s: float) -> list[Span]:
    return [replace(s, start=s.start + by_s, end=s.end + by_s) for s in worker]


def span(kind: ActionKind, stage: int, start: float, end: float) -> Span:
    return Span(kind=kind, stage=stage, microbatch=0, start=start, end=end)


@pytest.mark.parametrize("split_backward", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("offsets_s", [(0, 5, -3), (0, -0.5, -0.5), (0, 3600, 3600)])
def test_the_spans_of_all_hosts_are_in_the_time_of_the_first(
    layout: list[list[int]], split_backward: bool, offsets_s: tuple[float, ...]
) -> None:
    true = spans(layout, split_backward=split_backward)
    found = aligned([shifted(worker, by_s) for worker, by_s in zip(true, offsets_s, strict=True)])
    for worker, expected in zip(found, true, strict=True):
        assert [(s.kind, s.stage, s.microbatch) for s in worker] == [(s.kind, s.stage, s.microbatch) for s in expected]
        assert [s.start for s in worker] == pytest.approx([s.start for s in expected])
        assert [s.end for s in worker] == pytest.approx([s.end for s in expected])


def test_clocks_that_agree_with_the_messages_are_left_alone() -> None:
    true = spans(LAYOUTS["a loop"], split_backward=False)
    assert aligned(true) == true


def test_what_remains_is_half_the_difference_of_the_network_delays() -> None:
    one = [span("F", 0, 0.0, 1.0), span("B", 0, 5.4, 7.4)]
    other = shifted([span("F", 1, 1.2, 2.0), span("B", 1, 2.0, 5.0)], 60.0)
    assert clock_offset_s(one, other) == pytest.approx(60.0 - 0.1)


def test_an_offset_within_the_network_delays_is_not_corrected() -> None:
    one = [span("F", 0, 0.0, 1.0), span("B", 0, 5.4, 7.4)]
    other = shifted([span("F", 1, 1.2, 2.0), span("B", 1, 2.0, 5.0)], 0.3)
    assert clock_offset_s(one, other) == 0


def test_messages_in_one_direction_say_too_little() -> None:
    assert clock_offset_s([span("F", 0, 0.0, 1.0)], [span("F", 1, -50.0, -49.0)]) == 0
    assert clock_offset_s([], []) == 0

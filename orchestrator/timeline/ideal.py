"""A pipeline schedule under ideal conditions: its bubble, from the order of its actions.

The order comes from the measured spans of a step, so it is the one that was executed. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from orchestrator.timeline.spans import Kind, Span, bubble

Action = tuple[Kind, int, int]
"""``(kind, stage, microbatch)``"""

UNIT_TIMES: dict[Kind, float] = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
"""A backward pass takes twice as long as a forward pass, and its halves are equal, as in the papers on schedules."""


def order_of(spans: Iterable[Span]) -> list[Action]:
    """Return the actions of a worker in the order of their start."""
    return [(s.kind, s.stage, s.microbatch) for s in sorted(spans, key=lambda s: s.start)]


def simulate(orders: Sequence[Sequence[Action]]) -> list[list[Span]]:
    """Return the spans of each worker of a pipeline if every action takes its unit time and starts as early as it can.

    An action starts after the previous action of its worker and after the actions whose results it needs. For
    DualPipeV the bubble comes out too small: it sends the results of a pair of passes after both, and the order does
    not show the pairs.

    Args:
        orders: the actions of each worker in their order.

    Raises:
        ValueError: actions wait for one another, or for an action that no worker executes.
    """
    last_stage = max(stage for order in orders for _, stage, _ in order)
    ready_at: dict[Action, float] = {}
    waiting = [deque(order) for order in orders]
    done: list[list[Span]] = [[] for _ in orders]
    progress = True
    while progress:
        progress = False
        for actions, spans in zip(waiting, done, strict=True):
            while actions and all(need in ready_at for need in _needs(actions[0], last_stage)):
                kind, stage, microbatch = action = actions.popleft()
                free_at = spans[-1].end if spans else 0.0
                start = max([free_at, *(ready_at[need] for need in _needs(action, last_stage))])
                end = start + UNIT_TIMES[kind]
                spans.append(Span(kind=kind, stage=stage, microbatch=microbatch, start=start, end=end))
                ready_at["B" if kind == "I" else kind, stage, microbatch] = end
                progress = True
    if any(waiting):
        raise ValueError(f"no action can start: {[actions[0] for actions in waiting if actions]}")
    return done


def theoretical_bubble(workers: Sequence[Sequence[Span]]) -> float:
    """Return the bubble, 0 to 1, that the order of these spans has under ideal conditions."""
    return bubble(simulate([order_of(w) for w in workers]))


def _needs(action: Action, last_stage: int) -> list[Action]:
    """The actions of any worker that must precede ``action``. B stands for I too: both send the gradient."""
    kind, stage, microbatch = action
    if kind == "F":
        return [("F", stage - 1, microbatch)] if stage > 0 else []
    if kind == "W":
        return [("B", stage, microbatch)]
    after: list[Action] = [("B", stage + 1, microbatch)] if stage < last_stage else []
    return [("F", stage, microbatch), *after]

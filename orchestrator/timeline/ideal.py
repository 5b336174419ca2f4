"""A schedule of a pipeline under ideal conditions: its bubble and the activations it holds, from the order of actions.

The order is that of the spans of a step, so that it is the one that was carried out. Pure.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence

from orchestrator.timeline.spans import Kind, Span, bubble

Action = tuple[Kind, int, int]
"""``(kind, stage, microbatch)``"""

UNIT_TIMES: dict[Kind, float] = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
"""A backward pass is twice a forward pass, and its halves are equal: what the papers assume."""


def order_of(spans: Iterable[Span]) -> list[Action]:
    """A worker's actions, the first one first."""
    return [(s.kind, s.stage, s.microbatch) for s in sorted(spans, key=lambda s: s.start)]


def simulate(orders: Sequence[Sequence[Action]]) -> list[list[Span]]:
    """The spans of each worker of a pipeline if every action takes its unit time and begins as soon as it can:
    after the worker's action before it, and after those of any stage that it takes something from. (What the pairs
    of passes in DualPipeV give is sent after both; an order does not show them, and its bubble comes out smaller.)

    Raises:
        ValueError: actions wait for one another, or for one that nobody does.
    """
    last_stage = max(stage for order in orders for _, stage, _ in order)
    ready_at: dict[Action, float] = {}
    waiting = [deque(order) for order in orders]
    done: list[list[Span]] = [[] for _ in orders]
    moved = True
    while moved:
        moved = False
        for actions, spans in zip(waiting, done, strict=True):
            while actions and all(need in ready_at for need in _needs(actions[0], last_stage)):
                kind, stage, microbatch = action = actions.popleft()
                free_at = spans[-1].end if spans else 0.0
                start = max([free_at, *(ready_at[need] for need in _needs(action, last_stage))])
                end = start + UNIT_TIMES[kind]
                spans.append(Span(kind=kind, stage=stage, microbatch=microbatch, start=start, end=end))
                ready_at["B" if kind == "I" else kind, stage, microbatch] = end
                moved = True
    if any(waiting):
        raise ValueError(f"no action can go on: {[actions[0] for actions in waiting if actions]}")
    return done


def theoretical_bubble(workers: Sequence[Sequence[Span]]) -> float:
    """The bubble, 0 to 1, that the order of these spans has under ideal conditions."""
    return bubble(simulate([order_of(w) for w in workers]))


def live_microbatches(order: Iterable[Action]) -> dict[int, int]:
    """The most micro-batches whose activations each stage holds at once: from F until B, or until W."""
    live: Counter[int] = Counter()
    most: Counter[int] = Counter()
    for kind, stage, _ in order:
        live[stage] += {"F": 1, "B": -1, "I": 0, "W": -1}[kind]
        most[stage] = max(most[stage], live[stage])
    return dict(most)


def _needs(action: Action, last_stage: int) -> list[Action]:
    """What has to be done before, by whichever worker. The gradient for the stage before, be it from B or I, is a B."""
    kind, stage, microbatch = action
    if kind == "F":
        return [("F", stage - 1, microbatch)] if stage > 0 else []
    if kind == "W":
        return [("B", stage, microbatch)]
    after: list[Action] = [("B", stage + 1, microbatch)] if stage < last_stage else []
    return [("F", stage, microbatch), *after]

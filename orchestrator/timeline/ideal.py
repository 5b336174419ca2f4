"""A pipeline schedule replayed from the order of its actions: in unit time, for its bubble, or in measured times. Pure.

For the bubble, the order comes from the measured spans of a step, so it is the one that was executed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from orchestrator.timeline.spans import ActionKind, Span, bubble

Action = tuple[ActionKind, int, int]
"""``(kind, stage, microbatch)``"""

UNIT_TIMES: dict[ActionKind, float] = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
"""A backward pass takes twice as long as a forward pass, and its halves are equal, as in the papers on schedules."""


def unit_time(action: Action) -> float:
    """Return the duration of ``action`` in :data:`UNIT_TIMES`."""
    return UNIT_TIMES[action[0]]


def order_of(spans: Iterable[Span]) -> list[Action]:
    """Return the actions of a worker in the order of their start."""
    return [(s.kind, s.stage, s.microbatch) for s in sorted(spans, key=lambda s: s.start)]


def simulate(
    orders: Sequence[Sequence[Action]],
    *,
    duration_of: Callable[[Action], float] = unit_time,
    delay_of: Callable[[int], float] = lambda stage: 0.0,
    slowdown: Callable[[int], float] = lambda busy: 1.0,
) -> list[list[Span]]:
    """Return the spans of each worker of a pipeline if every action starts as early as it can.

    An action starts after the previous action of its worker and after the actions whose results it needs. For
    DualPipeV the bubble comes out too small: it sends the results of a pair of passes after both, and the order does
    not show the pairs.

    Args:
        orders: the actions of each worker in their order.
        duration_of: how long an action takes while no other worker computes.
        delay_of: how long the output of a stage, or its gradient, takes to another worker.
        slowdown: by the number of workers that compute at once, the factor by which each takes longer.

    Raises:
        ValueError: actions wait for one another, or for an action that no worker executes.
    """
    last_stage = max(stage for order in orders for _, stage, _ in order)
    worker_of = {stage: worker for worker, order in enumerate(orders) for _, stage, _ in order}
    done_at: dict[Action, float] = {}
    waiting = [deque(order) for order in orders]
    running: dict[int, tuple[Action, float, float]] = {}  # by worker: the action, its start, the work that is left
    done: list[list[Span]] = [[] for _ in orders]
    now = 0.0

    def ready_at(action: Action) -> float:
        """Return when the results that ``action`` needs are on its worker; infinity if that is not known yet."""
        times = [0.0]
        for need in _needs(action, last_stage):
            _, stage, _ = need
            elsewhere = worker_of.get(stage) != worker_of[action[1]]
            message = delay_of(min(stage, action[1])) if elsewhere else 0.0
            times.append(done_at.get(need, math.inf) + message)
        return max(times)

    while any(waiting) or running:
        next_start = math.inf
        for worker, actions in enumerate(waiting):
            if worker in running or not actions:
                continue
            if (ready := ready_at(actions[0])) <= now:
                action = actions.popleft()
                running[worker] = (action, now, duration_of(action))
            else:
                next_start = min(next_start, ready)
        factor = slowdown(len(running))
        next_end = now + min((left * factor for _, _, left in running.values()), default=math.inf)
        before, now = now, min(next_start, next_end)
        if now == math.inf:
            raise ValueError(f"no action can start: {[actions[0] for actions in waiting if actions]}")
        for worker, (action, start, left) in list(running.items()):
            if before + left * factor > now:
                running[worker] = (action, start, left - (now - before) / factor)
                continue
            kind, stage, microbatch = action
            done[worker].append(Span(kind=kind, stage=stage, microbatch=microbatch, start=start, end=now))
            done_at["B" if kind == "I" else kind, stage, microbatch] = now
            del running[worker]
    return done


def theoretical_bubble(workers: Sequence[Sequence[Span]]) -> float:
    """Return the bubble, 0 to 1, that the order of these spans has under ideal conditions: in unit time, alone."""
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

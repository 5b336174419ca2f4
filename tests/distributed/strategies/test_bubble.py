"""Schedules as four workers carry them out: their order, their bubble, the activations they hold, their clocks."""

import statistics
from dataclasses import dataclass, replace
from functools import cache

import pytest

from helpers.conformance.cases import Case, having, options_of
from helpers.conformance.training import make, steps
from helpers.ranks.gang import Gang
from helpers.ranks.schedules import live_microbatches
from helpers.records.runs import in_campaign
from jobs.sleep import Sleep
from orchestrator.strategies.mesh_trainer import MeshTrainer
from orchestrator.strategies.parts.stages import Stages
from orchestrator.timeline import Span, aligned, bubble, extent_s, order_of, theoretical_bubble

P, M = 4, 8
STAGES_PER_WORKER = {
    "GPipe": 1, "1F1B": 1, "Interleaved1F1B": 2, "LoopedBFS": 2,
    "InterleavedZeroBubble": 2, "ZBVZeroBubble": 2, "DualPipeV": 2,
}  # fmt: skip
FORMULAS = {name: (P - 1) / (STAGES_PER_WORKER[name] * M + P - 1) for name in ("GPipe", "1F1B", "Interleaved1F1B")}


@dataclass(frozen=True, kw_only=True)
class Seen:
    """The spans of each step on a worker, and the micro-batches that each of its stages held at most."""

    spans: list[tuple[Span, ...]]
    live: dict[int, int]


def observe(rank: int, case: Case) -> Seen:
    strategy = make(case, rank)
    assert isinstance(strategy, MeshTrainer)
    assert isinstance(strategy.part, Stages)
    spans = [strategy.spans() for _ in steps(strategy)]
    return Seen(spans=spans, live={stage.stage_index: stage.live for stage in strategy.part.timed_stages})


IN_CI = ("GPipe", "1F1B", "ZBVZeroBubble")


@cache
def workers(gang: Gang, schedule: str, *, forward_ms: float, n: int = 2, grad_accumulation: int = 1) -> list[Seen]:
    """``forward_ms``: how long a worker sleeps for a micro-batch, over all of its stages; ``n`` steps."""
    v = STAGES_PER_WORKER[schedule]
    options = options_of("pipeline", num_workers=P, schedule=schedule, num_microbatches=M)
    case = Case(
        job=Sleep(layers=P * v, forward_ms=forward_ms / v),
        train=having(steps=n, global_batch_size=M * grad_accumulation, grad_accumulation=grad_accumulation),
        options=options,
    )
    return gang.run(observe, case, world_size=P)


@pytest.mark.parametrize("schedule", ["1F1B", *in_campaign(*(name for name in STAGES_PER_WORKER if name != "1F1B"))])
def test_spans_of_hosts_with_other_clocks_are_put_in_order(gang: Gang, schedule: str) -> None:
    spans = [list(s.spans[-1]) for s in workers(gang, schedule, forward_ms=1, grad_accumulation=1)]
    assert aligned(spans) == spans, "one host has one clock"
    apart = [[replace(s, start=s.start - 60 * r, end=s.end - 60 * r) for s in w] for r, w in enumerate(spans)]
    together = aligned(apart)
    assert aligned(together) == together, "they still contradict the messages"
    assert abs(together[-1][0].start - spans[-1][0].start) < extent_s(spans)


@pytest.mark.in_turn
@pytest.mark.parametrize("grad_accumulation", [1, 2])
@pytest.mark.parametrize("schedule", [*IN_CI, *in_campaign(*(name for name in STAGES_PER_WORKER if name not in IN_CI))])
def test_actions(gang: Gang, schedule: str, grad_accumulation: int) -> None:
    seen = workers(gang, schedule, forward_ms=1, grad_accumulation=grad_accumulation)
    spans = [s.spans[-1] for s in seen]
    ideal = theoretical_bubble(spans)
    if schedule in FORMULAS:
        assert ideal == pytest.approx(FORMULAS[schedule])
    elif "Zero" in schedule:
        assert ideal < FORMULAS["Interleaved1F1B"] / 2
    held = [live_microbatches(order_of(worker)) for worker in spans]
    assert held == [s.live for s in seen]
    if schedule == "GPipe":
        assert held == [{stage: M} for stage in range(P)]
    if schedule == "1F1B":
        assert held == [{stage: P - stage} for stage in range(P)]

    everything = [span for worker in spans for span in worker]
    forward = {(s.stage, s.microbatch): s for s in everything if s.kind == "F"}
    backward = {(s.stage, s.microbatch): s for s in everything if s.kind in "BI"}
    numbers = range(M * grad_accumulation)
    assert (
        sorted(forward) == sorted(backward) == [(s, i) for s in range(P * STAGES_PER_WORKER[schedule]) for i in numbers]
    )
    for (stage, number), span in forward.items():
        assert span.end <= backward[stage, number].start
        if stage > 0:
            assert forward[stage - 1, number].end <= span.start, "on the clock of another worker"
            assert backward[stage, number].end <= backward[stage - 1, number].start


@pytest.mark.campaign
def test_measured_bubbles(gang: Gang) -> None:
    """On a machine that does nothing else."""
    measured = {}
    for schedule in STAGES_PER_WORKER:
        seen = workers(gang, schedule, forward_ms=60, n=3)
        measured[schedule] = statistics.median(bubble(step) for step in zip(*(s.spans for s in seen), strict=True))
    for schedule, formula in FORMULAS.items():
        assert measured[schedule] == pytest.approx(formula, abs=0.03), schedule
    assert measured["InterleavedZeroBubble"] < measured["1F1B"]
    assert measured["ZBVZeroBubble"] < measured["1F1B"]

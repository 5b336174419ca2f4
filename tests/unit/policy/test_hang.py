"""When a rank counts as hanging: by phase, by strategy, and over simulated runs of ranks that are slow and healthy."""

import heapq
import math
import random
import threading
from collections.abc import Generator, Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest

from helpers.conformance.cases import RECOVERY
from helpers.records.runs import wait_for
from orchestrator.config.redact import Redactor
from orchestrator.policy.hang import HangDetector, WatchedTime, culprit, limit_of
from orchestrator.protocol.flight import Enqueued
from orchestrator.protocol.messages import Heartbeat, Phase
from orchestrator.worker.control import control
from orchestrator.worker.control.control import Outbox
from orchestrator.worker.process.output import is_waiting, training_frame

CONFIG = replace(RECOVERY, hang_factor=30, hang_min_s=60, hang_max_s=300, build_max_s=3000)
LATE = 61.0


def beat(step: int, phase: Phase = "train", usual_s: float | None = 1.0, *, waiting: bool = False) -> Heartbeat:
    return Heartbeat(step=step, phase=phase, ticks=step, usual_tick_s=usual_s, waiting=waiting)


@pytest.mark.parametrize(
    ("phase", "usual_s", "expected"),
    [
        ("start", None, 3000),
        ("join", None, math.inf),
        ("connect", None, 300),
        ("build", None, 3000),
        ("train", None, 300),
        ("train", 0.01, 60),
        ("train", 3.0, 90),
        ("train", 20.0, 300),
        ("eval", None, 300),
        ("eval", 0.01, 60),
        ("eval", 3.0, 90),
        ("checkpoint", None, 300),
        ("end", None, 3000),
    ],
)
def test_each_phase_has_its_own_limit(phase: Phase, usual_s: float | None, expected: float) -> None:
    assert limit_of(CONFIG, beat(5, phase, usual_s))[0] == expected


def test_a_hang_at_the_same_step_doubles_the_limit_there() -> None:
    hangs = (5, 9, 5)
    assert [limit_of(CONFIG, beat(step), earlier_hangs=hangs)[0] for step in (4, 5, 9)] == [60, 240, 120]


def test_the_defaults_give_a_rank_that_answers_a_minute() -> None:
    from orchestrator.config.compose import compose
    from orchestrator.strategies import registry

    config, _ = compose([], [], registry.config_class)
    assert limit_of(config.recovery, beat(5, usual_s=0.01)) == (60, "recovery.hang_min_s")
    assert config.cluster.stopped_timeout_s == 5


def seen(*beats: Heartbeat, synchronous: bool = True, earlier_hangs: Sequence[int] = ()) -> HangDetector:
    """A rank for each of the heartbeats, which came at time 0."""
    detector = HangDetector(CONFIG, synchronous=synchronous, earlier_hangs=earlier_hangs)
    for rank, one in enumerate(beats):
        detector.observe(rank, one, 0.0)
    return detector


def test_ranks_hang_together_when_none_has_made_progress() -> None:
    detector = seen(beat(5), beat(5, waiting=True))
    assert (detector.hanging([0, 1], 60.0), detector.hanging([0, 1], LATE)) == ([], [0, 1])


def test_ranks_have_twice_the_time_after_a_hang_at_the_same_step() -> None:
    detector = seen(beat(5), earlier_hangs=(5,))
    assert (detector.hanging([0], 120.0), detector.hanging([0], 121.0)) == ([], [0])


def test_a_rank_that_waits_for_a_slow_one_does_not_hang() -> None:
    detector = seen(beat(5), beat(5, "eval", None))
    assert detector.hanging([0, 1], 299.0) == []
    detector.observe(1, beat(6, "eval", 0.1), 290.0)
    assert detector.hanging([0, 1], 349.0) == []
    assert detector.hanging([0, 1], 351.0) == [0, 1]


def test_a_wait_for_others_does_not_count_against_what_comes_next() -> None:
    detector = seen(beat(5, "checkpoint"), beat(5, "eval", None))
    detector.observe(0, beat(5, "checkpoint", waiting=True), 400.0)
    detector.observe(0, beat(5, "checkpoint"), 401.0)
    detector.observe(1, beat(5), 401.0)
    assert detector.hanging([0, 1], 500.0) == [], "rank 1 has waited for 99 s, and rank 0 has saved for 100 s"
    assert detector.hanging([0, 1], 701.0) == [0, 1]


def test_a_rank_that_has_ended_is_not_waited_for() -> None:
    detector = seen(beat(5), beat(9, "end"))
    assert (detector.hanging([0, 1], LATE), detector.hanging([0], LATE)) == ([], [0])


def test_nobody_hangs_while_a_rank_has_never_reported() -> None:
    assert seen(beat(5)).hanging([0, 1], 1e6) == []


@pytest.mark.parametrize(("waiting", "expected"), [(False, [0]), (True, [])])
def test_an_asynchronous_rank_hangs_alone_but_not_while_it_waits(waiting: bool, expected: list[int]) -> None:
    detector = seen(beat(5), beat(5), synchronous=False)
    for now in range(0, 62, 2):
        detector.observe(0, beat(5, waiting=waiting), float(now))
        detector.observe(1, beat(5 + now), float(now))
    assert detector.hanging([0, 1], LATE) == expected


def test_an_asynchronous_rank_that_has_just_been_released_is_not_blamed_for_its_wait() -> None:
    detector = seen(beat(5, waiting=True), beat(5), synchronous=False)
    detector.observe(0, beat(5, waiting=True), 100.0)
    detector.observe(1, beat(6), 100.0)
    detector.observe(0, beat(5), 101.0)
    assert (detector.hanging([0, 1], 159.0), detector.hanging([0, 1], 161.0)) == ([], [0, 1])


def test_asynchronous_ranks_that_all_wait_hang() -> None:
    detector = seen(beat(5), beat(5), synchronous=False)
    for rank in (0, 1):
        detector.observe(rank, beat(5, waiting=True), LATE)
    assert detector.hanging([0, 1], LATE) == [0, 1]


@pytest.mark.parametrize(
    ("phase", "usual_s", "key"),
    [("train", 1.0, "hang_min_s"), ("train", 3.0, "hang_factor"), ("eval", 20.0, "hang_max_s"),
     ("eval", None, "hang_max_s"), ("checkpoint", 1.0, "hang_max_s"), ("connect", None, "hang_max_s"),
     ("build", None, "build_max_s")],
)  # fmt: skip
def test_the_message_names_the_key_that_gives_more_time(phase: Phase, usual_s: float | None, key: str) -> None:
    text = seen(beat(5, phase, usual_s)).describe(0, 400.0)
    assert text == f"no progress for 400 s in phase {phase} (recovery.{key})"


def test_time_without_watching_does_not_count() -> None:
    watched = WatchedTime(100.0, longest_round_s=2.0)
    assert [watched.advance(now) for now in (100.5, 101.0, 701.0, 702.0)] == [100.5, 101.0, 103.0, 104.0]


def test_time_in_which_a_debugger_holds_a_rank_does_not_count() -> None:
    watched = WatchedTime(100.0, longest_round_s=2.0)
    rounds = [(101.0, False), (102.0, True), (103.0, True), (104.0, False)]
    assert [watched.advance(now, held=held) for now, held in rounds] == [101.0, 101.0, 101.0, 102.0]


def test_who_is_to_blame() -> None:
    steps = {0: 7, 1: 7, 2: 6}
    assert culprit([0, 1, 2], waiting={0: True, 2: False}, steps=steps, enqueued={})[0] == 1
    assert culprit([0, 1, 2], waiting={0: True, 1: False, 2: True}, steps=steps, enqueued={})[0] == 1
    assert culprit([0, 1, 2], waiting={0: True, 1: True, 2: True}, steps=steps, enqueued={})[0] == 2
    assert culprit([0, 2], waiting={0: True, 1: False, 2: True}, steps=steps, enqueued={})[0] == 2


def test_what_ranks_have_enqueued_tells_more_than_their_stacks() -> None:
    enqueued = {rank: Enqueued(last={"0": 9 - (rank == 2)}, operation={"0": "nccl:all_reduce"}) for rank in range(3)}
    waiting = {0: False, 1: True, 2: True}
    rank, why = culprit([0, 1, 2], waiting=waiting, steps={}, enqueued=enqueued)
    assert rank == 2
    assert why == "it has not enqueued operation 9 of group 0 (nccl:all_reduce), in which the others wait"
    assert culprit([0, 1, 2], waiting={0: True, 2: True}, steps={}, enqueued=enqueued)[0] == 1, "it does not answer"
    assert culprit([0, 1], waiting=waiting, steps={}, enqueued=enqueued)[0] == 0, "both have enqueued the same"


# What a worker reports ----------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The clock of all outboxes, which the test sets."""
    now = SimpleNamespace(s=0.0)
    monkeypatch.setattr(control, "time", SimpleNamespace(monotonic=lambda: now.s))
    return now


def test_each_phase_has_its_own_usual_time(clock: SimpleNamespace) -> None:
    outbox = Outbox(Redactor())

    def ticks(*durations_s: float) -> float | None:
        for seconds in durations_s:
            clock.s += seconds
            outbox.tick()
        return outbox.collect({}).usual_tick_s

    outbox.begin_loader()
    outbox.enter(0, "train")
    assert outbox.collect({}).usual_tick_s is None, "the first batch of a loader"
    assert ticks(90.0) is None, "nothing is usual yet"
    assert ticks(1.0, 1.0) == 1.0, "without the first batch"
    outbox.enter(3, "eval")
    outbox.begin_loader()
    assert ticks(50.0, 7.0) == 7.0
    outbox.enter(3, "train")
    assert ticks(30.0, 1.0) == 1.0, "without the time since the evaluation"
    outbox.enter(5, "eval")
    outbox.begin_loader()
    assert outbox.collect({}).usual_tick_s is None, "a new loader again"
    assert ticks(50.0) == 7.0


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("/lib/torch/distributed/distributed_c10d.py", True),
        ("/lib/orchestrator/strategies/mesh_trainer.py", True),
        pytest.param(
            "/lib/orchestrator/features/asynchronous/shared_memory.py", True, marks=pytest.mark.needs("asynchronous")
        ),
        ("/home/me/my_job.py", False),
    ],
)
def test_a_rank_waits_where_no_code_of_a_job_runs(file: str, expected: bool) -> None:
    begun, released = threading.Lock(), threading.Lock()
    begun.acquire()
    released.acquire()
    code = compile("begun.release(); released.acquire()", file, "exec")
    thread = threading.Thread(target=exec, args=(code, {"begun": begun, "released": released}))
    thread.start()
    try:
        assert begun.acquire(timeout=60)
        assert wait_for(lambda: is_waiting(training_frame(thread.ident)) == expected, timeout_s=60)
    finally:
        released.release()
        thread.join(10)


# Simulated runs -----------------------------------------------------------------------------------

Work = Generator[float | str, None, None]
"""What a simulated rank does: seconds that it works, or the name of a barrier at which it waits for all others."""
HANG = 1e9
ROUND_S = 2.5


def slow_run(outbox: Outbox, chance: random.Random, *, steps: int, synchronous: bool, hang_after: int | None) -> Work:
    """One rank of a run whose disks, first batches, evaluations and checkpoints are slow, but within the limits."""

    def batch(usual_s: float, *, first: bool = False) -> float:
        if first:
            return chance.choice([usual_s, chance.uniform(0, 290)])
        return chance.uniform(10, 55) if chance.random() < 0.05 else usual_s * chance.uniform(0.5, 2)

    usual_s = 10 ** chance.uniform(-1, 0.6)
    yield chance.uniform(0, 20)
    outbox.enter(0, "build")
    yield chance.choice([1.0, chance.uniform(0, 2900)])
    yield "state"
    outbox.begin_loader()
    outbox.enter(0, "train")
    for step in range(1, steps + 1):
        if step - 1 == hang_after:
            yield HANG
        yield batch(usual_s, first=step == 1)
        if synchronous:
            yield f"gradients {step}"
        outbox.enter(step, "train")
        outbox.tick()
        if step % 10 == 0:
            outbox.enter(step, "eval")
            if not synchronous:
                yield f"quiesced {step}"
            outbox.begin_loader()
            for number in range(chance.randint(1, 20)):  # shares of different sizes
                yield batch(usual_s / 3, first=number == 0)
                outbox.tick()
            outbox.enter(step, "checkpoint")
            yield f"capture {step}"
            yield chance.uniform(0, 250)
            outbox.enter(step, "train")
    outbox.enter(steps, "end")
    yield chance.uniform(0, 500)


def first_verdict(
    ranks: Sequence[Work], outboxes: Sequence[Outbox], clock: SimpleNamespace, *, synchronous: bool
) -> tuple[float, int] | None:
    """Run the ranks, watched by a detector. Return the time and the culprit of its first verdict; None if none."""
    detector = HangDetector(CONFIG, synchronous=synchronous)
    clock.s, next_round = 0.0, 0.0
    due = [(0.0, rank) for rank in range(len(ranks))]
    waiting: dict[int, str | float] = {}
    unfinished = set(range(len(ranks)))
    while due:
        clock.s, rank = heapq.heappop(due)
        while next_round < clock.s:
            for other in unfinished:
                detector.observe(other, outboxes[other].collect({}, waiting=other in waiting), next_round)
            if hanging := detector.hanging(unfinished, next_round):
                waits = {r: r in waiting for r in hanging}
                return next_round, culprit(hanging, waiting=waits, steps={}, enqueued={})[0]
            next_round += ROUND_S
        try:
            work = next(ranks[rank])
        except StopIteration:
            unfinished.discard(rank)
            continue
        if isinstance(work, float):
            heapq.heappush(due, (clock.s + work, rank))
            continue
        waiting[rank] = work
        if list(waiting.values()) == [work] * len(ranks):
            due = [(clock.s, r) for r in waiting]
            waiting.clear()
    return None


def simulate(
    seed: str, clock: SimpleNamespace, *, synchronous: bool, hang_after: int | None = None
) -> tuple[float, int] | None:
    chance = random.Random(seed)
    outboxes = [Outbox(Redactor()) for _ in range(chance.choice([1, 2, 4]))]
    culprits = [chance.randrange(len(outboxes))]
    ranks = [
        slow_run(
            outbox,
            random.Random(f"{seed} {rank}"),
            steps=20,
            synchronous=synchronous,
            hang_after=hang_after if rank in culprits else None,
        )
        for rank, outbox in enumerate(outboxes)
    ]
    verdict = first_verdict(ranks, outboxes, clock, synchronous=synchronous)
    if hang_after is not None:
        assert verdict[1] == culprits[0]
    return verdict


@pytest.mark.parametrize("synchronous", [True, False])
def test_no_slow_healthy_run_is_killed(clock: SimpleNamespace, synchronous: bool) -> None:
    verdicts = [simulate(f"{synchronous} {seed}", clock, synchronous=synchronous) for seed in range(40)]
    assert verdicts == [None] * len(verdicts)


@pytest.mark.parametrize("synchronous", [True, False])
def test_a_hang_in_a_slow_run_is_found_and_blamed_on_the_rank_that_hangs(
    clock: SimpleNamespace, synchronous: bool
) -> None:
    for seed in range(20):
        simulate(f"{synchronous} {seed}", clock, synchronous=synchronous, hang_after=seed % 20)


def test_the_simulation_notices_a_limit_that_is_too_short(
    clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.CONFIG", replace(CONFIG, hang_min_s=5))
    assert any(simulate(f"short {seed}", clock, synchronous=True) for seed in range(20))

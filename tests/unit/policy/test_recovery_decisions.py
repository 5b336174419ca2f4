"""What is done about failures: decided without Ray."""

import random
from collections.abc import Mapping
from dataclasses import replace

import pytest

from helpers.conformance.cases import RECOVERY
from orchestrator.planning.faults import Fault, parse, parse_entry, without_next
from orchestrator.policy.recovery import Failed, FailureRecord, RecoveryPlan, decide, newest_state
from orchestrator.protocol.messages import ANY_RANK, PENDING, RecoverableSteps

CONFIG = replace(RECOVERY, max_failures=10)
DEATH = FailureRecord(rank=1, step=40, message="died", raised=False, final=False)
ERROR = FailureRecord(rank=1, step=40, message="RuntimeError: x", raised=True, final=False)


def everything(step: int) -> RecoverableSteps:
    """What a replica of the whole model holds."""
    return {ANY_RANK: (step,)}


LEFT = {0: everything(40), 2: everything(39)}


def after(*failures: FailureRecord, survivors: Mapping[int, RecoverableSteps] = LEFT, **changes: int) -> object:
    config = replace(CONFIG, **changes)  # type: ignore[arg-type]
    return decide(failures, survivors, world_size=3, config=config)


def going_on(pause_s: float = 0) -> RecoveryPlan:
    return RecoveryPlan(lost=(1,), sources=(0, 0, 0), step=40, pause_s=pause_s)


def test_all_go_on_from_the_most_advanced_survivor_and_who_is_gone_is_replaced() -> None:
    assert after(DEATH) == going_on()
    other = after(DEATH, survivors={0: everything(39), 2: everything(40)})
    assert other == RecoveryPlan(lost=(1,), sources=(2, 2, 2), step=40, pause_s=0)


def test_without_a_survivor_that_has_it_all_the_checkpoint_is_the_source() -> None:
    nothing = RecoveryPlan(lost=(1,), sources=None, step=0, pause_s=0)
    assert after(DEATH, survivors={0: {}, 2: {}}) == nothing
    assert after(DEATH, survivors={}) == replace(nothing, lost=(0, 1, 2))


def test_stages_go_on_from_the_last_step_that_every_one_of_them_is_held_after() -> None:
    """Ranks 0 and 1 are the stages of one pipeline, 2 and 3 those of its replica; 1 is lost."""
    replicas = {0: {0: (40,), 2: (40,)}, 2: {0: (40,), 2: (40,)}, 3: {1: (40,), 3: (40,)}}
    assert newest_state(replicas, range(4)) == (40, (0, 3, 2, 3))
    uneven = {**replicas, 3: {1: (39,), 3: (39,)}}
    assert newest_state(uneven, range(4)) == (0, None)
    with_copies = {0: {0: (40, 30), 1: (30, 20)}, 2: {2: (40, 30), 3: (30, 20)}, 3: {3: (39, 30)}}
    assert newest_state(with_copies, range(4)) == (30, (0, 0, 2, 3))


@pytest.mark.parametrize("kill", range(50))
@pytest.mark.parametrize(("replicas", "stages"), [(3, 1), (2, 2), (3, 4)], ids=["ddp", "2 x 2", "3 x 4"])
def test_a_rank_killed_between_the_updates_of_its_peers_costs_no_step(replicas: int, stages: int, kill: int) -> None:
    """Step 41 is torn: some survivors have made its update, and all of them have its gradients, as one has the norm."""
    draw = random.Random(kill)
    keeps = {stage: draw.randrange(replicas) for stage in range(stages)}  # one survivor of each stage
    lost = [(r, s) for r in range(replicas) for s in range(stages) if r != keeps[s] and draw.random() < 0.4]
    left = [r * stages + s for r in range(replicas) for s in range(stages) if (r, s) not in lost]
    has_norm = {rank for rank in left if draw.random() < 0.5}
    survivors: dict[int, RecoverableSteps] = {}
    for rank in left:
        of_stage = range(rank % stages, replicas * stages, stages)
        if stages == 1:
            survivors[rank] = everything(41 if rank in has_norm else 40)
        elif rank in has_norm:
            survivors[rank] = dict.fromkeys(of_stage, (41,))
        else:
            survivors[rank] = {**dict.fromkeys(of_stage, (40, 41)), PENDING: (41,)}
    step, sources = newest_state(survivors, range(replicas * stages))
    assert step == (41 if has_norm else 40)
    assert sources is not None
    for rank, source in enumerate(sources):
        assert source in left
        assert source % stages == rank % stages
        assert source == rank or rank not in left or (stages == 1 and rank not in has_norm)


def test_no_failure_is_outlived_where_none_is_allowed_or_all_are_used_up() -> None:
    assert after(DEATH, max_failures=0) == Failed(1)
    on_and_on = [replace(DEATH, step=step) for step in (10, 20, 30)]
    assert isinstance(after(*on_and_on, max_failures=3), RecoveryPlan)
    assert after(*on_and_on, max_failures=2) == Failed(1, "3 failures, recovery.max_failures=2")


def test_three_generations_without_progress_end_the_run() -> None:
    assert isinstance(after(DEATH, DEATH), RecoveryPlan)
    assert after(DEATH, DEATH, DEATH) == Failed(1, "3 failures in a row without progress")
    assert isinstance(after(DEATH, DEATH, replace(DEATH, step=41)), RecoveryPlan)


def test_pauses_come_with_standstill_alone_and_grow() -> None:
    earlier = replace(DEATH, step=30)
    assert after(earlier, DEATH) == going_on()
    assert after(earlier, DEATH, DEATH) == going_on(pause_s=1)


def test_an_error_of_the_code_is_not_tried_for_ever() -> None:
    assert after(replace(ERROR, step=0)) == Failed(1)
    assert isinstance(after(replace(DEATH, step=0)), RecoveryPlan)
    assert isinstance(after(ERROR), RecoveryPlan)
    assert after(ERROR, ERROR) == Failed(1, "the same error occurred twice at the same step")
    objects = [replace(ERROR, message=f"KeyError: <Net object at 0x7f{n}a0> (pid {n})") for n in (12, 345)]
    assert after(*objects) == Failed(1, "the same error occurred twice at the same step")
    assert isinstance(after(ERROR, replace(ERROR, message="another")), RecoveryPlan)
    assert after(replace(ERROR, final=True)) == Failed(1)


# Faults to rehearse -------------------------------------------------------------------------------


def test_errors_as_they_are_written() -> None:
    assert parse("kill@40:1") == Fault(kind="kill", step=40, rank=1)
    assert parse("stop@7:0:eval") == Fault(kind="stop", step=7, rank=0, phase="eval")


@pytest.mark.parametrize(
    ("word", "why"), [("kill", "expected <kind>@"), ("burn@1:0", "unknown kind"), ("kill@1:0:lunch", "unknown phase")]
)
def test_what_is_no_error_is_refused(word: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse(word)


@pytest.mark.parametrize(
    ("word", "why"),
    [("kill@3:2", "no rank 2 among 2"), ("kill@9:0", "the run has 8 steps"), ("random:8", "has room for 7")],
)
def test_what_could_never_strike_is_refused(word: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_entry(word, seed=0, steps=8, num_ranks=2)


def test_drawn_errors_are_those_of_the_seed() -> None:
    drawn = parse_entry("random:5", seed=1, steps=100, num_ranks=3)
    assert len({error.step for error in drawn}) == 5
    assert all(1 < error.step <= 100 and error.rank < 3 for error in drawn)
    assert parse_entry("random:5", seed=1, steps=100, num_ranks=3) == drawn
    assert parse_entry("random:5", seed=2, steps=100, num_ranks=3) != drawn
    assert [parse(str(error)) for error in drawn] == list(drawn)


def test_a_error_strikes_once() -> None:
    first, second, others = (parse(word) for word in ("kill@10:1", "kill@20:1", "kill@5:0"))
    assert without_next([second, first, others], 1) == (second, others)
    assert without_next([others], 1) == (others,)


def test_a_script_restarts_whatever_fails_as_often_as_it_may() -> None:
    error = replace(ERROR, step=0)
    for number in range(1, 5):
        found = decide([error] * number, {}, world_size=1, config=replace(CONFIG, max_failures=4), always_restarts=True)
        assert isinstance(found, RecoveryPlan)
    assert after(*[error] * 4, max_failures=3) == Failed(1, "the same error occurred twice at the same step")
    assert decide(
        [error] * 5, {}, world_size=1, config=replace(CONFIG, max_failures=4), always_restarts=True
    ) == Failed(1, "5 failures, recovery.max_failures=4")

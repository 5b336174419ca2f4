"""Which size a run has, and who sits where: decided without Ray."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.files.golden import Golden
from helpers.machines.plans import LAPTOP, config_of, plan_of
from orchestrator.config.build import ConfigError
from orchestrator.config.schema import Config
from orchestrator.driver.checked_runs import check_all
from orchestrator.driver.preflight import child_checks
from orchestrator.driver.preflight.child_checks import plan_sizes
from orchestrator.job import Job
from orchestrator.planning.plan import Node, Plan, make_plan
from orchestrator.policy.elastic import RankAssignment, Sizes, find_rank_assignment, find_rescue, reassigned
from orchestrator.policy.recovery import RecoveryPlan, plan_after_pause
from orchestrator.strategies import registry


def ddp(num_workers: int) -> Plan:
    return plan_of(LAPTOP, f"strategy.num_workers={num_workers}", embedded=True)


def grid(replicas: int, close: str = "stages") -> Plan:
    """Pipelines of two stages."""
    words = ["strategy=ddp_pipeline", "strategy.pipeline_parallel_size=2", f"strategy.close={close}"]
    return plan_of(LAPTOP, *words, f"strategy.num_workers={2 * replicas}", "train.global_batch_size=96", embedded=True)


def sizes_of(*plans: Plan) -> Sizes:
    """The sizes of these plans, the smallest first; the run starts with the largest."""
    by_mesh = {plan.mesh: plan for plan in plans}
    return Sizes(tuple(by_mesh), by_mesh.__getitem__, initial=plans[-1].mesh)


DDP = sizes_of(*(ddp(n) for n in range(2, 5)))
GRID = sizes_of(*(grid(n) for n in range(1, 4)))


def before(plan: Plan, sizes: Sizes, alive: list[int], ready: int) -> tuple[int | None, ...] | None:
    rank_assignment = find_rank_assignment(plan, sizes, alive, ready=ready)
    return None if rank_assignment is None else rank_assignment.before


@pytest.mark.parametrize(
    ("room", "late", "expected"),
    [
        pytest.param(2, False, 3, id="other-nodes-are-to-be-avoided"),
        pytest.param(2, True, 2, id="in-vain"),
        pytest.param(4, False, 4, id="a-node-has-answered"),
        pytest.param(4, True, 4, id="in-vain-with-room-for-more"),
    ],
)
def test_only_a_wait_in_vain_makes_a_run_smaller_and_room_makes_it_larger(room: int, late: bool, expected: int) -> None:
    refused = DDP.plan(DDP.meshes[1])
    assert DDP.next_request(refused, room, patience_is_over=late).world_size == expected


@pytest.mark.parametrize(
    ("alive", "ready", "expected"),
    [
        ([0, 1, 3], 0, (0, 1, 3)),
        ([0, 1, 3], 1, (0, 1, 3, None)),
        ([1, 2], 0, (1, 2)),
        ([3], 1, (3, None)),
        ([3], 0, None),
        ([0, 1, 2, 3], 2, (0, 1, 2, 3)),
    ],
)
def test_a_run_has_as_many_workers_as_there_are_up_to_its_most(
    alive: list[int], ready: int, expected: tuple[int | None, ...] | None
) -> None:
    assert before(DDP.largest, DDP, alive, ready) == expected


def test_a_run_of_one_size_waits_for_workers_unless_they_are_ready() -> None:
    fixed = Sizes.of(ddp(2))
    assert find_rank_assignment(fixed.initial, fixed, [0], ready=0) is None
    assert before(fixed.initial, fixed, [0], 1) == (0, None)


def test_replicas_are_lost_and_gained_as_a_whole() -> None:
    """Ranks 0, 2, 4 have the first stage, 1, 3, 5 the second."""
    assert before(GRID.largest, GRID, [0, 1, 2, 4, 5], 0) == (0, 1, 2, 5)
    assert before(GRID.largest, GRID, [1, 2], 0) == (2, 1), "a whole pipeline of what two have left"
    assert before(grid(1), GRID, [0, 1], 3) == (0, 1, None, None)
    assert before(grid(1), GRID, [0, 1], 4) == (0, 1, None, None, None, None)


def test_replicas_of_parts_are_lost_and_gained_as_a_whole() -> None:
    """Ranks 0, 2, 4 have the first part, 1, 3, 5 the second."""
    words = ("strategy=hsdp", "strategy.shard_size=2")
    parts = sizes_of(*(plan_of(LAPTOP, *words, f"strategy.num_workers={n}", embedded=True) for n in (4, 6)))
    assert before(parts.largest, parts, [0, 1, 2, 4, 5], 0) == (0, 1, 2, 5)
    assert before(parts.plan(parts.smallest), parts, [0, 1, 2, 3], 2) == (0, 1, 2, 3, None, None)
    without_a_part = find_rank_assignment(parts.largest, parts, [0, 2, 4, 5], ready=0)
    assert without_a_part.state_sources is None


def test_where_a_stage_is_lost_everywhere_all_begin_anew() -> None:
    rank_assignment = find_rank_assignment(GRID.largest, GRID, [1, 3, 5], ready=0)
    assert rank_assignment == RankAssignment(plan=GRID.plan(GRID.smallest), before=(1, 3), state_sources=None)


def test_keeping_what_one_has_comes_before_size() -> None:
    rank_assignment = find_rank_assignment(GRID.largest, GRID, [0, 1, 3, 5], ready=0)
    assert (rank_assignment.before, rank_assignment.state_sources) == ((0, 1), (0, 1)), (
        "two replicas could only begin from a checkpoint"
    )


def test_stages_are_found_by_their_rank_whichever_way_ranks_are_numbered() -> None:
    """With replicas close, ranks 0 to 2 have the first stage and 3 to 5 the second."""
    close = sizes_of(*(grid(n, "replicas") for n in range(1, 4)))
    assert before(close.largest, close, [0, 2, 3, 4, 5], 0) == (0, 2, 3, 4)


@pytest.mark.parametrize(
    "strategy", [("strategy=pipeline",), ("strategy=fsdp",), ("strategy=ddp", "strategy.shard_optimizer=true")]
)
def test_a_model_that_is_divided_anew_keeps_nothing(strategy: tuple[str, ...]) -> None:
    pipelines = tuple(plan_of(LAPTOP, *strategy, f"strategy.num_workers={n}", embedded=True) for n in (2, 3))
    sizes = sizes_of(*pipelines)
    shrunk = RankAssignment(plan=pipelines[0], before=(0, 2), state_sources=None)
    assert find_rank_assignment(pipelines[1], sizes, [0, 2], ready=0) == shrunk
    grown = RankAssignment(plan=pipelines[1], before=(0, 1, None), state_sources=None)
    assert find_rank_assignment(pipelines[0], sizes, [0, 1], ready=1, saved=True) == grown
    assert before(pipelines[0], sizes, [0, 1], 1) == (0, 1), "nothing is saved"
    assert before(pipelines[1], sizes, [0, 2], 1) == (0, None, 2), "a new worker takes the part that was lost"


# Where the state comes from -----------------------------------------------------------------------


LOST = RecoveryPlan(lost=(2,), sources=None, step=0, pause_s=1.5)


def test_sources_are_named_by_the_new_ranks() -> None:
    everything = {rank: {r: (step,) for r in range(4)} for rank, step in ((0, 39), (1, 40), (3, 40))}
    rank_assignment = find_rank_assignment(DDP.largest, DDP, [0, 1, 3], ready=0)
    assert rank_assignment is not None
    assert reassigned(LOST, rank_assignment, everything) == RecoveryPlan(
        lost=(), sources=(1, 1, 2), step=40, pause_s=1.5
    )


def test_a_new_replica_gets_its_stages_from_another() -> None:
    held = {0: {0: (7,), 2: (7,)}, 1: {1: (7,), 3: (7,)}}
    rank_assignment = find_rank_assignment(grid(1), GRID, [0, 1], ready=2)
    assert rank_assignment is not None
    assert reassigned(LOST, rank_assignment, held) == RecoveryPlan(
        lost=(2, 3), sources=(0, 1, 0, 1), step=7, pause_s=1.5
    )


def test_who_has_no_seat_is_no_source() -> None:
    held = {0: {0: (7,), 2: (7,), 4: (7,)}, 3: {r: (7,) for r in (1, 3, 5)}, 5: {r: (8,) for r in (1, 3, 5)}}
    rank_assignment = find_rank_assignment(GRID.largest, GRID, [0, 3, 5], ready=0)
    assert rank_assignment.before == (0, 3)
    assert reassigned(LOST, rank_assignment, held).sources == (0, 1)


def test_a_model_that_is_cut_anew_comes_from_the_checkpoint() -> None:
    rank_assignment = find_rank_assignment(GRID.largest, GRID, [1, 3, 5], ready=0)
    assert rank_assignment is not None
    assert reassigned(LOST, rank_assignment, {1: {1: (7,)}}).sources is None


def test_those_who_leave_hand_nothing_over() -> None:
    held = {0: {0: (9,), 1: (9,)}, 1: {0: (9,), 1: (9,)}}
    assert plan_after_pause(held, (0,), world_size=2) == RecoveryPlan(lost=(0,), sources=(1, 1), step=9, pause_s=0)
    assert plan_after_pause({0: {0: (9,)}, 1: {1: (9,)}}, (0,), world_size=2).sources is None


# Which sizes there are ----------------------------------------------------------------------------


def offered(*words: str) -> list[tuple[int, int | None]]:
    """World size and number of micro-batches of each plan."""
    (checked_run,) = check_all([["tracking=none", *words]])
    plans = [checked_run.sizes.plan(mesh) for mesh in checked_run.sizes.meshes]
    return [(p.world_size, p.pipeline.num_microbatches if p.pipeline else None) for p in plans]


@pytest.mark.slow
def test_every_number_of_workers_between_the_two_is_a_size() -> None:
    assert offered("strategy.num_workers=[2,4]") == [(2, None), (3, None), (4, None)]
    assert offered("strategy.num_workers=3") == [(3, None)]
    assert offered("strategy=pipeline", "strategy.num_workers=[2,3]", "train.global_batch_size=24") == [(2, 4), (3, 6)]
    assert offered("strategy=fsdp", "strategy.num_workers=[1,4]") == [(2, None), (3, None), (4, None)]
    hsdp = ("strategy=hsdp", "strategy.num_workers=[2,8]")
    assert offered(*hsdp, "strategy.shard_size=2") == [(4, None), (6, None), (8, None)]
    assert offered(*hsdp, "strategy.shard_size=auto") == [(8, None)], "replicas of four, which leave as a whole"


@pytest.mark.parametrize(("strategy", "numbers"), [("ddp", [4]), ("pipeline", [3, 2])])
def test_the_job_is_checked_once_for_each_number_of_stages(
    strategy: str, numbers: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A check may build the model, with all its stages. It is made in a child process."""
    rules, checked = registry.load(strategy), tmp_path / "checked"
    check = rules.check

    def counted(config: Config, job: Job, plan: Plan, errors: list[str]) -> tuple[str, ...]:
        with checked.open("a") as file:
            print(plan.world_size, file=file)
        return check(config, job, plan, errors)

    monkeypatch.setattr(rules, "check", counted)
    check_all([["tracking=none", f"strategy={strategy}", f"strategy.num_workers=[2,{numbers[0]}]"]])
    assert [int(number) for number in checked.read_text().split()] == numbers


def test_the_micro_batches_of_replicas_keep_their_size() -> None:
    words = ("strategy=ddp_pipeline", "strategy.pipeline_parallel_size=2", "strategy.num_workers=[2,6]")
    assert offered(*words, "train.global_batch_size=96") == [(2, 12), (4, 6), (6, 4)]
    assert offered(*words, "strategy.num_microbatches=3", "train.global_batch_size=54") == [(2, 9), (6, 3)], (
        "9 micro-batches cannot be shared by two replicas"
    )


def test_errors_may_be_rehearsed_on_any_rank_of_the_largest_size(golden: Golden) -> None:
    assert len(offered("strategy.num_workers=[2,4]", "recovery.chaos=[kill@3:3]")) == 3
    with golden.raises(ConfigError):
        offered("strategy.num_workers=[4,4]", "recovery.chaos=[kill@3:4]")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("strategy.num_workers=[3,2]",), "1 <= min <= max"),
        (("strategy.num_workers=[0,2]",), "1 <= min <= max"),
        (("strategy=single", "strategy.num_workers=[1,2]"), "needs a fixed number of workers; set one number"),
        (("strategy.num_workers=[2,3]", "train.global_batch_size=1"), "fewer than one sample for each of 2 workers"),
    ],
)
def test_sizes_that_cannot_be(words: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        offered(*words)


@pytest.mark.parametrize("words", [("strategy=ddp",), ("strategy=ddp_pipeline", "strategy.pipeline_parallel_size=2")])
def test_only_the_plans_that_are_needed_are_made(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def counted(config: Config, *args: Any, **options: Any) -> Plan:
        made.append(config.strategy.num_workers)  # type: ignore[arg-type]
        return make_plan(config, *args, **options)

    monkeypatch.setattr(child_checks, "make_plan", counted)
    (checked_run,) = check_all(
        [["tracking=none", *words, "strategy.num_workers=[2,64]", "train.global_batch_size=1024"]]
    )
    assert checked_run.sizes.max_processes == 64
    assert set(made) == {64}
    assert checked_run.sizes.plan(checked_run.sizes.smallest).world_size == 2
    assert checked_run.sizes.fitting(9).world_size in (8, 9)


def test_on_an_autoscaler_a_run_starts_with_what_is_granted_and_not_less_than_its_least() -> None:
    errors: list[str] = []
    head = Node(node_id="head", name="head", cpus=0, gpus=0)
    config = config_of("strategy=ddp", "strategy.num_workers=[2,10]", "cluster.autoscaling=true")
    sizes = plan_sizes(config, None, (head,), errors, oversubscribe_cpus=False)
    assert sizes is not None, errors
    assert sizes.initial.world_size == 10
    assert [sizes.fitting(room).world_size for room in (0, 2, 6, 12)] == [2, 2, 6, 10]


def test_the_largest_size_that_fits_leaves_room_for_the_spares() -> None:
    by_mesh = {mesh: replace(DDP.plan(mesh), spares=1) for mesh in DDP.meshes}
    spared = Sizes(DDP.meshes, by_mesh.__getitem__, initial=DDP.meshes[-1])
    assert [spared.fitting(room).world_size for room in (2, 4, 5)] == [2, 3, 4]


# Where survivors can save -------------------------------------------------------------------------


def rescue(plan: Plan, sizes: Sizes, alive: list[int]) -> tuple[int | None, ...] | None:
    assignment = find_rescue(plan, sizes, alive)
    return None if assignment is None else assignment.before


def planned(*words: str) -> Sizes:
    (checked_run,) = check_all([["tracking=none", "train.global_batch_size=96", *words]])
    assert checked_run.sizes is not None
    return checked_run.sizes


@pytest.mark.slow
def test_survivors_save_below_the_smallest_size() -> None:
    fixed = planned("strategy.num_workers=4")
    assert rescue(fixed.initial, fixed, [1, 3]) == (1, 3)
    elastic = planned("strategy.num_workers=[3,4]")
    assert rescue(elastic.initial, elastic, [2]) == (2,)
    replicas = planned("strategy=ddp_pipeline", "strategy.pipeline_parallel_size=2", "strategy.num_workers=4")
    assert rescue(replicas.initial, replicas, [1, 2]) == (2, 1)
    assert rescue(replicas.initial, replicas, [1, 3]) is None, "the first stage is lost everywhere"
    pipeline = planned("strategy=pipeline", "strategy.num_workers=3")
    assert rescue(pipeline.initial, pipeline, [0, 1]) is None


@pytest.mark.slow
@pytest.mark.needs("asynchronous")
def test_parameters_on_servers_have_no_second_copy() -> None:
    servers = planned("strategy=parameter_server", "strategy.num_workers=2")
    assert rescue(servers.initial, servers, [0, 1]) is None

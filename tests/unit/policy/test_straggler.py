"""Which rank is slower than the others, and what other programs used of the machines of a run."""

import random
from collections.abc import Iterable

import pytest

from orchestrator.policy.straggler import MIN_SLOW_S, MIN_SLOW_STEPS, SharedMachine, StragglerWatch
from orchestrator.protocol.events import Straggler
from orchestrator.protocol.messages import TrainPoint
from orchestrator.protocol.metrics import MachineUse, describe_sharing

Round = tuple[float, ...]
"""The time of each rank for one step, in ms, without waiting for the others."""
EVEN: Round = (10.0, 12.0, 11.0)
SLOW_2: Round = (10.0, 10.0, 40.0)


def watched(rounds: Iterable[Round], *, steps: int = 10, data_wait_ms: float = 0.0) -> list[tuple[float, Straggler]]:
    """Log a point of so many ``steps`` for each round; when stragglers were found, in seconds of training."""
    found, seconds, watch = [], 0.0, StragglerWatch(3)
    for number, own_ms in enumerate(rounds, 1):
        step_ms = max(own_ms)
        seconds += step_ms * steps / 1e3
        for rank, ms in enumerate(own_ms):
            point = TrainPoint(
                step=number * steps, time=0.0, loss_sum=0.0, weight=1.0, step_ms=(step_ms,) * steps,
                data_wait_ms=data_wait_ms if ms == step_ms else 0.0, comm_share=1 - ms / step_ms,
            )  # fmt: skip
            if (straggler := watch.add(rank, point)) is not None:
                found.append((seconds, straggler))
    return found


def test_a_steadily_slow_rank_is_named_after_ten_seconds_with_what_it_spends_its_time_on() -> None:
    ((seconds, found),) = watched([EVEN] * 100 + [SLOW_2] * 100, data_wait_ms=30.0)
    began = 100 * 0.12
    assert began + MIN_SLOW_S <= seconds < began + MIN_SLOW_S + 1
    assert found.rank == 2
    assert (found.compute_ms, found.others_compute_ms) == pytest.approx((10.0, 10.0))
    assert (found.data_wait_ms, found.others_data_wait_ms) == pytest.approx((30.0, 0.0))
    assert found.slower_by == pytest.approx(4.0)
    assert found.throughput_loss == pytest.approx(0.75, abs=0.03)


def test_slow_steps_count_too() -> None:
    ((_, found),) = watched([(2000.0, 2000.0, 6000.0)] * 40, steps=1)
    assert found.step == MIN_SLOW_STEPS


@pytest.mark.parametrize("steps", [1, 10, 100])
def test_noise_of_three_ranks_that_are_slow_in_turn_never_warns(steps: int) -> None:
    chance = random.Random(5)

    def step() -> Round:
        slow = chance.randrange(3)
        return tuple(chance.uniform(4, 6) * (chance.uniform(1, 5) if rank == slow else 1) for rank in range(3))

    rounds = ([step() for _ in range(steps)] for _ in range(20_000 // steps))
    means = (tuple(sum(times) / steps for times in zip(*own, strict=True)) for own in rounds)
    assert watched(means, steps=steps) == []


def test_ranks_that_are_slow_for_seconds_in_turn_never_warn() -> None:
    turns = [tuple(40.0 if rank == turn % 3 else 10.0 for rank in range(3)) for turn in range(60)]
    assert watched([own for own in turns for _ in range(15)]) == [], "each for 6 s"


def test_a_single_long_pause_is_none() -> None:
    assert watched([EVEN] * 20 + [(10.0, 10.0, 3000.0)] + [EVEN] * 200) == []


def test_a_few_even_points_do_not_hide_a_straggler() -> None:
    rounds = [EVEN if number % 10 == 9 else SLOW_2 for number in range(100)]
    ((_, found),) = watched(rounds)
    assert found.rank == 2


def test_what_costs_little_is_not_worth_a_warning() -> None:
    """A rank that is twice as slow in the tenth of the step that is not communication."""
    watch, found = StragglerWatch(3), []
    for number in range(1, 200):
        for rank in range(3):
            point = TrainPoint(
                step=10 * number, time=0.0, loss_sum=0.0, weight=1.0, step_ms=(100.0,) * 10, data_wait_ms=0.0,
                comm_share=0.85 if rank == 2 else 0.925,
            )  # fmt: skip
            found.append(watch.add(rank, point))
    assert not any(found)


def test_it_is_named_once_and_again_after_it_had_recovered() -> None:
    rounds = [SLOW_2] * 200 + [EVEN] * 300 + [SLOW_2] * 100
    assert [found.rank for _, found in watched(rounds)] == [2, 2]


def test_a_rank_with_a_new_worker_starts_afresh() -> None:
    watch = StragglerWatch(2)

    def seconds_until_found() -> int:
        for second in range(1, 100):
            step_ms = (100.0,) * 10
            for rank, comm_share in ((0, 0.8), (1, 0.0)):
                point = TrainPoint(
                    step=second, time=0.0, loss_sum=0.0, weight=1.0, step_ms=step_ms, data_wait_ms=0.0,
                    comm_share=comm_share,
                )  # fmt: skip
                if watch.add(rank, point) is not None:
                    return second
        raise AssertionError("not found")

    assert seconds_until_found() == 10
    watch.forget(1)
    assert seconds_until_found() == 10


EVEN_USE, IDLE_AND_BUSY = MachineUse(own_s=1.0, busy_s=1.0, idle_s=1.0), {"busy_s": 2.0, "idle_s": 0.0}


@pytest.mark.parametrize(
    ("uses", "driver_s", "expected", "said"),
    [
        ([(rank, "a", MachineUse(own_s=0.9, busy_s=1.95, idle_s=0.05)) for rank in (0, 1)] * 10, 1.0, (2.5, 2.5), None),
        ([(0, "a", EVEN_USE), (1, "b", MachineUse(own_s=0.6, **IDLE_AND_BUSY))], 0.0, (70.0, 0.0), "70% of the CPUs"),
        ([(0, "a", MachineUse(own_s=4.0, busy_s=24.0, idle_s=40.0))], 0.0, (31.25, 62.5), None),
        ([*[(0, "a", EVEN_USE)] * 3, (1, "a", MachineUse(own_s=0.5, **IDLE_AND_BUSY))], 0.0, (0.0, 50.0), None),
    ],
    ids=["the ranks and the driver", "the node that others used most", "more CPUs stand idle", "a rank came later"],
)
def test_what_others_used_of_the_cpus(
    uses: list[tuple[int, str, MachineUse]], driver_s: float, expected: tuple[float, float], said: str | None
) -> None:
    machine = SharedMachine()
    for use in uses:
        machine.add(*use)
    summary = machine.summary(driver_node="a" if driver_s else "", driver_s=driver_s)
    assert (summary["others_cpu_pct"], summary["idle_cpu_pct"]) == pytest.approx(expected)
    assert describe_sharing(summary) == said


def test_nothing_measured_is_nothing_said_and_the_use_of_a_gpu_is_told() -> None:
    machine = SharedMachine()
    assert machine.summary(driver_node="a", driver_s=1.0) == {}
    assert describe_sharing({}) is None
    for pct in (10.0, 50.0):
        machine.add(1, "a", MachineUse(own_s=1.0, busy_s=1.0, idle_s=9.0, others_gpu_pct=pct))
    assert describe_sharing(machine.summary(driver_node="a", driver_s=0.0)) == "30% of a GPU"

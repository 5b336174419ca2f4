"""Which failure came first, and what is said of it."""

from types import SimpleNamespace
from typing import Any

import pytest

from helpers.files.golden import Golden
from orchestrator.policy.failure import cannot_leave_nccl, death, first_failure, standstill, unreachable_addresses
from orchestrator.protocol.messages import Failure, Outcome, Phase, WorkerInfo


def failed(time: float, *, collateral: bool, step: int = 3) -> Outcome:
    failure = Failure(message="x", traceback="", time=time, collateral=collateral, log_tail="")
    return Outcome(status="failed", step=step, failure=failure)


def test_culprit_is_the_first_that_is_not_collateral() -> None:
    outcomes = {
        0: failed(1.0, collateral=True),
        1: failed(3.0, collateral=False),
        2: failed(2.0, collateral=False),
        3: Outcome(status="done", step=9),
    }
    assert first_failure(outcomes) == 2
    assert first_failure({0: outcomes[0]}) == 0
    assert first_failure({3: outcomes[3]}) is None


def test_a_error_at_an_earlier_step_comes_first_whenever_it_was_noticed() -> None:
    spread = {0: failed(1.0, collateral=False, step=5), 1: failed(2.0, collateral=False, step=4)}
    assert first_failure(spread) == 1


def test_death_says_what_ray_knows() -> None:
    out_of_memory = death("out of memory", pid=7, hostname="a", time=0.0)
    assert "7 on a" in out_of_memory.message
    assert "out of memory" in out_of_memory.message
    assert not out_of_memory.collateral


@pytest.mark.parametrize(
    ("phase", "key", "timeout_s"),
    [
        ("join", "rendezvous_timeout_s", 60),
        ("start", "rendezvous_timeout_s", 60),
        ("train", "collective_timeout_s", 30),
    ],
)
def test_a_standstill_names_the_limit_of_those_who_waited(phase: Phase, key: str, timeout_s: float) -> None:
    config: Any = SimpleNamespace(rendezvous_timeout_s=60, collective_timeout_s=30)
    failure = standstill(config, phase, time=1.0)
    assert failure.message == f"no progress while the others waited {timeout_s} s for it (cluster.{key})"
    assert not failure.collateral


def test_an_address_is_unreachable_once_no_living_node_has_it() -> None:
    workers = [
        WorkerInfo(node_id=node_id, node_ip=ip, hostname=node_id, pid=1)
        for node_id, ip in (("a", "10.0.0.1"), ("b", "10.0.0.2"), ("c", "10.0.0.3"), ("d", "10.0.0.3"))
    ]
    assert unreachable_addresses(workers, {"b", "c"}) == ("10.0.0.2",)
    assert unreachable_addresses(workers, {"a", "c", "d"}) == ("10.0.0.1", "10.0.0.3")


def test_ranks_that_cannot_leave_nccl_are_said_to_be_lost_too(golden: Golden) -> None:
    note = cannot_leave_nccl({2: "connect", 0: "connect", 3: "train"}, lost=1)
    assert "[0, 2]" in note
    golden.says(note)
    assert cannot_leave_nccl({0: "train", 2: None}, lost=1) is None

"""Who has not enqueued what the others wait for, from the records that torch's flight recorder writes."""

import json
import re
import zlib
from pathlib import Path
from typing import Any

import pytest

from helpers.conformance.cases import Case, config_of, plan_of
from helpers.jobs.quick_jobs import digits
from orchestrator.driver.run.health import write_stacks
from orchestrator.policy.hang import awaited
from orchestrator.protocol.flight import Enqueued, enqueued_in
from orchestrator.protocol.messages import FlightRecord, Stacks
from orchestrator.records.run_dir import RunDir

SINCE_NS = 1000
WORLD = ("0", "default_pg")


def entry(
    name: str,
    *,
    group: tuple[str, str] = WORLD,
    collective: int = 0,
    message: int = 0,
    state: str = "completed",
    created_ns: int = SINCE_NS,
) -> dict[str, Any]:
    """An entry as torch 2.13 writes it."""
    is_p2p = " " in name
    return {
        "collective_seq_id": collective, "input_dtypes": ["Float"], "input_sizes": [[3]], "is_p2p": is_p2p, "op_id": 1,
        "output_dtypes": ["Float"], "output_sizes": [[3]], "p2p_seq_id": message, "pg_id": 0, "process_group": group,
        "profiling_name": f"nccl:{name}", "record_id": 0, "retired": state == "completed", "state": state,
        "thread_id": "139909524441984", "thread_name": "python", "time_created_ns": created_ns,
        "time_discovered_completed_ns": 0, "time_discovered_started_ns": 0, "timeout_ms": 1800000,
    }  # fmt: skip


def recorded(*entries: dict[str, Any], **members: list[int]) -> Enqueued:
    config = {name: {"name": name, "desc": "", "ranks": json.dumps(ranks)} for name, ranks in members.items()}
    dump = {
        "comm_lib_version": "2.27.5", "entries": list(entries), "nccl_comm_state": {}, "pg_config": config,
        "pg_status": {"0": {"last_completed_collective": "1", "last_enqueued_collective": "3"}}, "version": "2.10",
    }  # fmt: skip
    if not entries:
        del dump["entries"]  # as torch does
    return enqueued_in(json.dumps(dump), since_ns=SINCE_NS, world_size=3)


def reduced(number: int, group: tuple[str, str] = WORLD, state: str = "scheduled") -> dict[str, Any]:
    return entry("all_reduce", group=group, collective=number, state=state)


def test_the_last_operation_of_each_group_counts_and_those_of_earlier_generations_do_not() -> None:
    found = recorded(
        entry("all_reduce", collective=70, created_ns=SINCE_NS - 1),
        reduced(4),
        reduced(5),
        entry("broadcast", collective=2, group=("1", "undefined")),
    )
    assert found.last == {"0": 5, "1": 2}
    assert found.operation == {"0": "nccl:all_reduce", "1": "nccl:broadcast"}
    assert found.unfinished is None
    assert recorded(reduced(4), {**reduced(5), "record_id": 7}).unfinished == 7
    assert recorded() == Enqueued()


def test_the_rank_behind_the_others_is_awaited() -> None:
    ranks = {0: recorded(reduced(9)), 1: recorded(reduced(8)), 2: recorded(reduced(9))}
    assert awaited(ranks) == (1, "operation 9 of group 0 (nccl:all_reduce)")
    ranks[1] = recorded()
    assert awaited(ranks) == (1, "operation 9 of group 0 (nccl:all_reduce)"), "it has enqueued nothing at all"
    side = ("1", "undefined")
    ranks = {0: recorded(reduced(9, side)), 1: recorded(), 2: recorded(reduced(9, side))}
    assert awaited(ranks) is None, "it may not belong to the group"
    ranks[1] = recorded(**{"1": [0, 1, 2]})
    assert awaited(ranks) == (1, "operation 9 of group 1 (nccl:all_reduce)")


def test_nobody_is_awaited_if_all_have_enqueued_the_same() -> None:
    assert awaited({rank: recorded(reduced(9)) for rank in range(3)}) is None
    assert awaited({}) is None


def test_a_rank_that_is_behind_because_it_waits_itself_is_not_to_blame() -> None:
    """Ranks 2 and 3 are a pipeline of which rank 3 hangs; rank 0 waits for rank 2 to sum gradients."""
    first, second, stages = ("1", "first stages"), ("2", "second stages"), ("3", "a pipeline")
    groups = {"1": [0, 2], "2": [1, 3], "3": [2, 3]}
    ranks = {
        0: recorded(reduced(7, first), **groups),
        1: recorded(reduced(7, second), **groups),
        2: recorded(reduced(6, first), entry("send 0->1", group=stages, message=40, state="started"), **groups),
        3: recorded(reduced(6, second), **groups),
    }
    assert awaited(ranks) == (3, "operation 7 of group 2 (nccl:all_reduce)")


@pytest.mark.parametrize(
    ("of_0", "of_1", "expected"),
    [
        (["send 0->1"], [], (1, "a receive of group 0 (0->1)")),
        (["send 0->1"], ["recv 1<-0"], None),
        (["send 0->1", "send 0->1"], ["recv 1<-0"], (1, "a receive of group 0 (0->1)")),
        ([], ["recv 1<-0"], (0, "a send of group 0 (0->1)")),
        (["send 0->1"], ["send 1->0"], None),
    ],
    ids=["no receive", "matched", "second receive", "no send", "each waits for the other"],
)
def test_messages_are_matched_by_their_ends(of_0: list[str], of_1: list[str], expected: tuple[int, str] | None) -> None:
    ranks = {
        rank: recorded(*(entry(name, message=i, state="started") for i, name in enumerate(names)), **{"0": [0, 1]})
        for rank, names in enumerate((of_0, of_1))
    }
    assert awaited(ranks) == expected


def test_messages_are_matched_in_the_default_group_of_every_generation() -> None:
    """After the first one, torch records no ranks of it."""
    ranks = {rank: recorded(reduced(1), **{"0": []}) for rank in range(3)}
    ranks[0] = recorded(reduced(1), entry("send 0->1", message=1, state="started"), **{"0": []})
    assert awaited(ranks) == (1, "a receive of group 0 (0->1)")


def test_messages_of_a_batch_are_completed_with_the_batch() -> None:
    """Only the entry of the batch is ever marked, and old entries have left the record of one rank."""

    def batch(number: int, name: str, state: str) -> list[dict[str, Any]]:
        return [
            entry(name, message=number, state="scheduled"),
            {**entry("coalesced", message=number, state=state), "is_p2p": True},
        ]

    sender = recorded(*batch(1, "send 0->1", "completed"), *batch(2, "send 0->1", "started"), **{"0": [0, 1]})
    receiver = recorded(*batch(2, "recv 1<-0", "started"), **{"0": [0, 1]})
    assert sender.sends == {("0", 0, 1): 1}
    assert awaited({0: sender, 1: receiver}) is None


def test_the_records_are_kept_beside_the_stacks(tmp_path: Path) -> None:
    run_dir, plan = RunDir(tmp_path), plan_of(config_of(Case(job=digits()), 3))
    (tmp_path / "logs").mkdir()
    flight = FlightRecord(enqueued=Enqueued(), dump=zlib.compress(b'{"version": "2.10"}'))
    stacks = {0: Stacks(text="in forward", waiting=False, flight=flight), 2: Stacks(text="in backward", waiting=True)}
    path = write_stacks(run_dir, 4, plan, stacks)
    text = Path(path).read_text()
    assert re.search("in forward.*does not answer.*in backward", text, re.DOTALL)
    assert {p.name for p in (tmp_path / "logs").iterdir()} == {
        "stacks-generation-4.txt", "flight-generation-4-rank-0.json",
    }  # fmt: skip
    assert json.loads(run_dir.flight_file(4, 0).read_text()) == {"version": "2.10"}
    (tmp_path / "nowhere").touch()
    assert write_stacks(RunDir(tmp_path / "nowhere"), 4, plan, stacks).startswith("not written (")


def test_only_ranks_with_a_record_are_awaited() -> None:
    ranks = {0: recorded(reduced(9), entry("send 0->2", message=1, state="started"), **{"0": [0, 1, 2]})}
    assert awaited(ranks) is None

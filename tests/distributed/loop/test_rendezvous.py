"""Forming and leaving process groups."""

import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Timer

import psutil
import pytest
import torch
import torch.distributed as dist

from helpers.conformance.cases import assignment
from helpers.conformance.training import CPU
from helpers.ranks.gang import HOST, SOON_S
from orchestrator.compat.backends import flight_record
from orchestrator.compat.enqueue_gate import GATE, enqueueing_through
from orchestrator.policy.hang import awaited
from orchestrator.protocol.flight import Enqueued, enqueued_in
from orchestrator.protocol.messages import Assignment
from orchestrator.worker.control import rendezvous
from orchestrator.worker.control.control import AbandonedError, PeersMissingError, StepGate
from orchestrator.worker.control.rendezvous import Teardown


def join(rank: int, world_size: int, generation: int, port: int, timeout_s: float = 20) -> dist.TCPStore:
    orders = assignment(
        rank=rank,
        world_size=world_size,
        generation=generation,
        store_port=port,
        run_dir="",
        rendezvous_timeout_s=timeout_s,
    )
    store = rendezvous.join(orders, store=None)
    rendezvous.connect(orders, store, node_ip=HOST, device=CPU)
    return store


def together(world_size: int, store: dist.Store, place: str) -> None:
    """Wait until so many ranks are at ``place``."""
    store.add(place, 1)
    while store.add(place, 0) < world_size:
        time.sleep(0.01)


def sum_of_ranks() -> float:
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    return float(total)


@pytest.fixture
def store():
    return rendezvous.open_store(HOST, timeout_s=10)


def late(rank: int, port: int) -> str:
    together(3, dist.TCPStore(HOST, port, is_master=False, wait_for_workers=False), "about to join")
    with pytest.raises(ConnectionError) as raised:
        join(rank if rank < 2 else 3, 5, 0, port, timeout_s=3)
    assert not dist.is_initialized()
    return str(raised.value)


def test_missing_ranks_are_named(gang, store):
    missing = []
    for answer in gang.ask(late, store.port, world_size=3, grouped=False):
        assert answer.error is None, answer.trace
        missing.append(re.search(r"ranks (\[.*?\])", answer.value)[1])
        assert "cluster.rendezvous_timeout_s" in answer.value
    assert "[2, 4]" in missing, "the last one to give up has seen all the others"


def impatient(orders: Assignment, *, build_max_s: float, collective_timeout_s: float) -> Assignment:
    config = orders.config
    config = replace(
        config,
        cluster=replace(config.cluster, collective_timeout_s=collective_timeout_s),
        recovery=replace(config.recovery, build_max_s=build_max_s, hang_min_s=0.1, hang_max_s=0.1),
    )
    return replace(orders, environment=replace(orders.environment, config=config))


def slow_to_build(rank: int, port: int, build_s: float | None, limit_s: float) -> str | None:
    """Rank 1 takes longer to build its model than the collective timeout allows; without ``build_s``, until rank 0 has
    given up."""
    orders = assignment(rank=rank, world_size=2, generation=1, store_port=port, run_dir="")
    orders = impatient(orders, build_max_s=limit_s, collective_timeout_s=3)
    gate = StepGate(timeout_s=60)
    store = rendezvous.join(orders, store=None)
    rendezvous.connect(orders, store, node_ip=HOST, device=CPU)
    if rank == 1 and build_s is None:
        store.wait(["rank 0 has given up"])
        rendezvous.leave()
        return None
    time.sleep((build_s or 0) * rank)
    try:
        rendezvous.wait_until_built(orders, store, gate)
        assert sum_of_ranks() == 1.0
    except PeersMissingError as e:
        store.set("rank 0 has given up", "")
        return str(e)
    finally:
        together(1 if build_s is None else 2, store, "at the end")
        rendezvous.leave()
    return None


def test_a_rank_that_is_slow_to_build_is_not_waited_for_in_a_collective_operation(gang, store):
    answers = gang.ask(slow_to_build, store.port, 5.0, 60.0, world_size=2, grouped=False)
    assert [a.value for a in answers] == [None, None], answers[0].trace


def test_a_rank_that_never_builds_is_named(gang, store):
    answers = gang.ask(slow_to_build, store.port, None, 0.5, world_size=2, grouped=False)
    assert answers[0].value.startswith("ranks [1] were not ready to train within 0.5 s; ")
    assert answers[0].value.endswith("recovery.build_max_s")


def test_a_wait_for_a_slow_rank_ends_with_the_generation(store):
    orders = assignment(rank=0, world_size=2, generation=3, store_port=store.port, run_dir="")
    gate = StepGate(timeout_s=60)
    Timer(0.2, gate.abandon, [3]).start()
    with pytest.raises(AbandonedError):
        rendezvous.wait_until_built(orders, store, gate)


def two_generations(rank: int, port: int) -> list[float]:
    sums = []
    for generation in (1, 2):
        kept = join(rank, 3, generation, port)
        sums.append(sum_of_ranks())
        rendezvous.leave()
        del kept
    rendezvous.leave()  # also where there is none
    return sums


def test_a_second_generation_in_the_same_processes(gang, store):
    answers = gang.ask(two_generations, store.port, world_size=3, grouped=False)
    assert [a.value for a in answers] == [[3.0, 3.0]] * 3, [a.error for a in answers]


def through_a_broken_one(rank: int, port: int) -> float:
    """Rank 2 leaves without a word; the others go on without it, with another rank's number changed."""
    kept = join(rank, 3, 1, port)
    sum_of_ranks()  # a rank that leaves while others still connect would break their joining
    if rank == 2:
        rendezvous.leave()
        return 0.0
    with pytest.raises(RuntimeError):
        sum_of_ranks()
    rendezvous.leave()
    kept = join(1 - rank, 2, 2, port)
    total = sum_of_ranks()
    rendezvous.leave()
    del kept
    return total


def test_survivors_of_a_broken_group_form_the_next(gang, store):
    answers = gang.ask(through_a_broken_one, store.port, world_size=3, grouped=False, timeout_s=SOON_S)
    assert [a.error for a in answers] == [None] * 3
    assert [a.value for a in answers] == [1.0, 1.0, 0.0]


def after_an_abort(rank: int, port: int) -> float:
    """No group is left when another thread has aborted them. A late abort does not concern the next generation."""
    teardown = Teardown(word_timeout_s=SOON_S)
    teardown.begin(1, backend="nccl")
    with enqueueing_through(GATE, device="CPU"):
        kept = join(rank, 3, 1, port)
        side = dist.new_group([0, 1, 2])
        with ThreadPoolExecutor(1) as control:
            control.submit(teardown.abort, 1).result()
        with pytest.raises(ValueError, match="not been initialized"):
            sum_of_ranks()
        with pytest.raises(ConnectionAbortedError):
            side.allreduce([torch.ones(1)])
        del side
        teardown.start(lambda: None, clean=False)
        teardown.begin(2, backend="nccl")
        kept = join(rank, 3, 2, port)
        teardown.abort(1)
        total = sum_of_ranks()
    rendezvous.leave()
    del kept
    return total


def test_a_group_can_be_formed_after_an_abort(gang, store):
    answers = gang.ask(after_an_abort, store.port, world_size=3, grouped=False, timeout_s=SOON_S)
    assert [a.value for a in answers] == [3.0] * 3, answers[0].trace


def recorded(rank: int, port: int) -> Enqueued:
    """Rank 1 does not take part in the last sum. The groups of an earlier generation have the same names."""
    kept = join(rank, 3, 1, port)
    for _ in range(7):
        sum_of_ranks()
    rendezvous.leave()
    since_ns = time.time_ns()
    kept = join(rank, 3, 2, port)
    side = dist.new_group([1, 2])
    sum_of_ranks()
    if rank > 0:
        dist.all_reduce(torch.ones(1), group=side)
    pending = [] if rank == 1 else [dist.all_reduce(torch.ones(1), async_op=True)]
    found = enqueued_in(flight_record(dist.group.WORLD), since_ns=since_ns, world_size=3)
    together(3, kept, "recorded")
    del side, pending
    rendezvous.leave()
    return found


def test_the_record_of_each_rank_tells_who_has_not_enqueued_the_last_operation(gang, store):
    answers = gang.ask(recorded, store.port, world_size=3, grouped=False, timeout_s=SOON_S)
    ranks = {rank: answer.value for rank, answer in enumerate(answers)}
    assert [ranks[rank].last["0"] for rank in range(3)] == [2, 1, 2], answers[0].trace
    assert awaited(ranks) == (1, "operation 2 of group 0 (gloo:all_reduce)")


def after_a_failed_attempt(rank: int, port: int) -> float:
    """Rank 0 has tried to connect to one that was lost; rank 1 is new. They have to agree on the name of the group."""
    if rank == 0:
        orders = assignment(rank=0, world_size=2, generation=1, store_port=port, run_dir="")
        orders = impatient(orders, build_max_s=20, collective_timeout_s=0.5)
        store = dist.TCPStore(HOST, port, is_master=False, wait_for_workers=False)
        with pytest.raises(RuntimeError):
            rendezvous.connect(orders, store, node_ip=HOST, device=CPU)
        assert not dist.is_initialized()
    kept = join(rank, 2, 2, port)
    total = sum_of_ranks()
    rendezvous.leave()
    del kept
    return total


def test_a_group_can_be_formed_after_a_failed_attempt(gang, store):
    answers = gang.ask(after_a_failed_attempt, store.port, world_size=2, grouped=False, timeout_s=SOON_S)
    assert [a.value for a in answers] == [1.0, 1.0], answers[0].trace


def with_own_store(rank: int, port: int) -> float:
    own = rendezvous.open_store(HOST, timeout_s=10)
    orders = replace(
        assignment(rank=0, world_size=1, generation=0, store_port=0, run_dir=""), store_host="192.0.2.1", store_port=9
    )
    assert rendezvous.join(orders, store=own) is own, "its own store, not the address"
    rendezvous.connect(orders, own, node_ip=HOST, device=CPU)
    total = sum_of_ranks()
    rendezvous.leave()
    return total


def test_the_rank_that_opened_the_store_uses_it(gang):
    assert gang.ask(with_own_store, 0, world_size=1, grouped=False)[0].value == 0.0


def listening(port: int) -> set[str]:
    connections = psutil.Process().net_connections()
    return {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN and c.laddr.port == port}


def own_addresses() -> list[str]:
    addresses = (a for addresses in psutil.net_if_addrs().values() for a in addresses)
    return [a.address for a in addresses if a.family.name == "AF_INET"]


@pytest.mark.parametrize("host", own_addresses())
def test_a_store_listens_on_its_own_address_only(host):
    own = rendezvous.open_store(host, timeout_s=10)
    assert listening(own.port) == {host}
    other = dist.TCPStore(host, own.port, is_master=False, wait_for_workers=False)
    other.set("key", "value")
    assert own.get("key") == b"value"
    del other
    port = own.port
    del own
    assert listening(port) == set()


def test_stores_of_two_runs_do_not_meet(store):
    other = rendezvous.open_store(HOST, timeout_s=10)
    assert other.port != store.port

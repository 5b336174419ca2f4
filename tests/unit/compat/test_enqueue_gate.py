"""The gate for threads that enqueue operations of process groups: none does once it is closed, and an abort waits."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from helpers.records.runs import wait_for
from orchestrator.compat.enqueue_gate import EnqueueGate, enqueueing_through
from orchestrator.compat.process_groups import all_gather_single, all_reduce_together

SOON_S = 60.0


@pytest.fixture
def group() -> Iterator[None]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_closed_gate_lets_nobody_in_until_it_is_opened() -> None:
    gate = EnqueueGate()
    assert gate.close(timeout_s=0)
    with pytest.raises(ConnectionAbortedError, match="another rank was lost"), gate:
        pass
    gate.open()
    with gate:
        pass


def test_several_threads_may_be_inside() -> None:
    """A thread whose operation blocks until another rank comes must not keep another from what that rank waits for."""
    gate, both_inside = EnqueueGate(), threading.Barrier(2)

    def enqueue() -> None:
        with gate:
            both_inside.wait(SOON_S)

    with ThreadPoolExecutor(2) as pool:
        for thread in [pool.submit(enqueue) for _ in range(2)]:
            thread.result()
    assert gate.close(timeout_s=0)


def test_who_closes_the_gate_waits_for_those_inside_who_may_finish_a_batch() -> None:
    gate, inside, is_closing, may_leave = EnqueueGate(), threading.Event(), threading.Event(), threading.Event()

    def enqueue_batch() -> None:
        with gate:
            inside.set()
            assert is_closing.wait(SOON_S)
            with gate:  # a part of the batch
                pass
            assert may_leave.wait(SOON_S)

    def is_closed() -> bool:
        try:
            with gate:
                return False
        except ConnectionAbortedError:
            return True

    with ThreadPoolExecutor(2) as pool:
        trained = pool.submit(enqueue_batch)
        assert inside.wait(SOON_S)
        aborting = pool.submit(gate.close, timeout_s=SOON_S)
        wait_for(is_closed, timeout_s=SOON_S)
        is_closing.set()
        with pytest.raises(TimeoutError):
            aborting.result(timeout=0.1)
        may_leave.set()
        assert aborting.result()
        trained.result()


def test_one_that_stays_inside_does_not_keep_an_abort_from_freeing_it() -> None:
    gate, inside, aborted = EnqueueGate(), threading.Event(), threading.Event()

    def blocks() -> None:
        with gate:
            inside.set()
            aborted.wait(SOON_S)

    with ThreadPoolExecutor(1) as training:
        trained = training.submit(blocks)
        assert inside.wait(SOON_S)
        assert not gate.close(timeout_s=0.1)
        assert not trained.done()
        aborted.set()
        trained.result()
    assert gate.close(timeout_s=0)


def _ddp() -> None:
    replica = DistributedDataParallel(nn.Linear(2, 1), init_sync=False)
    replica(torch.ones(1, 2)).sum().backward()


OPERATIONS: dict[str, Callable[[], object]] = {
    "sum": lambda: dist.all_reduce(torch.ones(1)),
    "several sums": lambda: all_reduce_together([torch.ones(1)], dist.group.WORLD).wait(),  # type: ignore[arg-type]
    "gathering": lambda: all_gather_single(torch.ones(1), torch.ones(1), dist.group.WORLD),  # type: ignore[arg-type]
    "broadcast": lambda: dist.broadcast(torch.ones(1), src=0),
    "scattering": lambda: dist.reduce_scatter_tensor(torch.ones(1), torch.ones(1)),
    "barrier": dist.barrier,
    "send": lambda: dist.isend(torch.ones(1), group=dist.group.WORLD, group_dst=0),
    "batch": lambda: dist.batch_isend_irecv([dist.P2POp(dist.irecv, torch.ones(1), 0)]),
    "object": lambda: dist.broadcast_object_list([1], src=0),
    "group": lambda: dist.new_group([0]),
    "ddp, whose sums C++ starts": _ddp,
}


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.usefixtures("group")
def test_every_operation_of_process_groups_passes_the_gate(name: str) -> None:
    gate = EnqueueGate()
    with enqueueing_through(gate, device="CPU"):
        gate.close(timeout_s=0)
        with pytest.raises(ConnectionAbortedError):
            OPERATIONS[name]()
        with pytest.raises(ConnectionAbortedError), torch.inference_mode():
            OPERATIONS["sum"]()
    dist.all_reduce(torch.ones(1))


@pytest.mark.usefixtures("group")
def test_operations_elsewhere_do_not_pass_it() -> None:
    gate = EnqueueGate()
    gate.close(timeout_s=0)
    with enqueueing_through(gate, device="CUDA"):
        dist.all_reduce(torch.ones(1))
        dist.barrier()

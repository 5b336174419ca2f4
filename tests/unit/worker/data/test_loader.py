"""Loader processes, and what a broken dataset does."""

import contextlib
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import closing
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import get_worker_info

from helpers.files.golden import Golden
from helpers.ranks.batches import Numbers, eval_batches, evaluate, train
from helpers.records.runs import PYTHONPATH, wait_for
from orchestrator.user_code.errors import JobError
from orchestrator.worker.data import data_loader
from orchestrator.worker.data.data_loader import DataError


class Broken(Numbers):
    """Item ``bad`` raises ``error``, ends its process ("kill", "exit", "leave") or never comes ("hang")."""

    def __init__(self, n: int, bad: int, error: Exception | str):
        super().__init__(n)
        self.bad, self.error = bad, error

    def __getitem__(self, index: int) -> int:
        if index != self.bad:
            return index
        if self.error == "kill":
            assert get_worker_info() is not None, "only a loader process may be killed"
            os.kill(os.getpid(), signal.SIGKILL)
        if self.error == "exit":
            os._exit(0)
        if self.error == "leave":
            sys.exit(0)
        if self.error == "hang":
            time.sleep(60)
        assert isinstance(self.error, Exception)
        raise self.error


class Batched(Broken):
    """The same, whole batches at a time."""

    fetches = 0

    def __getitems__(self, indices: list[int]) -> list[int]:
        self.fetches += 1
        return [super(Batched, self).__getitem__(i) for i in indices]


class TwoPartError(Exception):
    """Cannot be rebuilt from its text alone."""

    def __init__(self, code: int, what: str):
        super().__init__(f"{what} ({code})")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_reading_leaves_the_global_generator_alone(num_workers: int) -> None:
    before = torch.get_rng_state()
    list(train(Numbers(20), num_workers=num_workers))
    list(evaluate(Numbers(20), num_workers=num_workers))
    assert torch.get_rng_state().equal(before)


def test_loader_processes_read_the_same() -> None:
    layout = {"data_parallel_size": 2, "dp_rank": 1, "grad_accumulation": 2, "samples_consumed": 24}
    expected = [[b.tolist() for b in step] for step in train(Numbers(20), **layout)]
    read = [[b.tolist() for b in step] for step in train(Numbers(20), num_workers=2, **layout)]
    assert read == expected


def test_evaluation_goes_in_order_also_with_loader_processes() -> None:
    rows = [i for batch, valid in evaluate(Numbers(21), num_workers=2) for i in batch[:valid].tolist()]
    assert rows == list(range(21))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", [Broken, Batched])
@pytest.mark.parametrize("error", [KeyError("pixel"), StopIteration("early"), TwoPartError(7, "torn")], ids=repr)
def test_an_item_that_raises_is_named(kind: type[Broken], error: Exception, num_workers: int) -> None:
    with pytest.raises(DataError) as caught:
        list(train(kind(32, 13, error), num_workers=num_workers))
    assert str(caught.value) == f"train data, sample 13: {type(error).__name__}: {error}"
    cause = caught.value.__cause__
    assert cause is not None
    if num_workers:
        assert "in __getitem__" in str(cause), "the traceback of the loader process"
    else:
        assert type(cause) is type(error)


def test_the_split_is_named(golden: Golden) -> None:
    with golden.raises(DataError):
        list(evaluate(Broken(9, 5, OSError("gone"))))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_collate_that_raises_is_named(num_workers: int) -> None:
    def collate(items: list[int]) -> Any:
        raise ValueError("ragged")

    with pytest.raises(DataError, match=r"^train data, collating samples \[.*\]: ValueError: ragged$"):
        next(train(Numbers(8), collate=collate, num_workers=num_workers))


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    ("items", "collate", "message"),
    [
        ([1, None, 2], None, r"the dataset returns None for sample 1; return a sample, or leave it out in the "),
        ([1, None, 2], max, r"the dataset returns None for sample 1 \(TypeError: .*\); return a sample"),
        ([(1, None)] * 3, None, r"torch cannot make a batch .*NoneType.*; let Job.dataset return tensors or numbers, "),
        (
            [torch.ones(n) for n in range(3)],
            None,
            r"torch cannot make a batch .*Job.collate; sample \d is float32 \[\d\], sample \d float32 \[\d\]$",
        ),
        ([1, 2, 3], lambda items: None, "the function of job.collate returns None; return a pair"),
    ],
)
def test_samples_that_make_no_batch_are_an_error_of_the_job(items, collate, message, num_workers) -> None:
    with pytest.raises(JobError, match=rf"^train data, collating samples \[.*\]: {message}"):
        next(train(items, collate=collate, num_workers=num_workers, global_batch_size=3))


def test_a_batched_dataset_is_asked_once_per_batch() -> None:
    dataset = Batched(32, -1, "")
    batches = list(train(dataset, steps=3))
    assert dataset.fetches == 3
    assert [b.tolist() for (b,) in batches] == [b.tolist() for (b,) in train(Numbers(32), steps=3)]


def in_thread(work: Any) -> BaseException | None:
    """What ``work`` raises in a thread of its own: where workers train."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as e:
            raised.append(e)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(timeout=30)
    assert not thread.is_alive()
    return raised[0] if raised else None


@pytest.mark.slow
def test_a_killed_loader_process_is_reported_soon() -> None:
    """In a thread, as in a worker: torch raises an error anywhere in the main thread."""
    error = in_thread(lambda: list(train(Broken(32, 13, "kill"), num_workers=2)))
    assert isinstance(error, DataError)
    assert "killed by SIGKILL" in str(error)
    assert "data.num_workers" in str(error)
    assert not multiprocessing.active_children()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("exit", r"^a loader process ended \(.*raise an exception there$"),
        ("leave", r"^train data, sample 13: Broken.__getitem__ calls sys.exit\(0\) \(test_loader.py, line \d+\)"),
    ],
)
def test_a_loader_process_that_the_dataset_ends_is_an_error_of_the_data(how: str, text: str) -> None:
    error = in_thread(lambda: list(train(Broken(32, 13, how), num_workers=2)))
    assert isinstance(error, (DataError, JobError)), error
    assert re.match(text, str(error)), error
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_a_dataset_that_hangs_is_reported_and_ended() -> None:
    with pytest.raises(DataError, match=r"no batch within 1\.5 s.*data\.num_workers"):
        list(train(Broken(32, 13, "hang"), num_workers=2, timeout_s=1.5))
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_a_batch_may_take_longer_than_a_turn_of_waiting() -> None:
    def slow(items: list[int]) -> list[int]:
        time.sleep(1.5)
        return items

    assert len(list(train(Numbers(8), collate=slow, num_workers=1, steps=2))) == 2


def test_loader_processes_live_from_the_first_batch_to_close() -> None:
    batches = train(Numbers(64), num_workers=2, steps=100)
    assert not multiprocessing.active_children()
    with closing(batches):
        next(batches)
        assert len(multiprocessing.active_children()) == 2
    assert not multiprocessing.active_children()


def test_loader_processes_stay_from_one_evaluation_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_loader, "_POLL_S", 8.0)  # the time in which idle ones have to answer

    with closing(eval_batches(Numbers(21), num_workers=2)) as batches:
        assert rows(batches) == list(range(21))
        processes = {p.pid for p in multiprocessing.active_children()}
        assert rows(batches) == list(range(21))
        assert {p.pid for p in multiprocessing.active_children()} == processes
        assert len(processes) == 2
    assert not multiprocessing.active_children()


def test_an_idle_loader_process_that_has_died_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_loader, "_POLL_S", 0.5)
    with closing(eval_batches(Numbers(21), num_workers=2)) as batches:
        assert rows(batches) == list(range(21))
        killed = psutil.Process(min(p.pid for p in multiprocessing.active_children() if p.pid is not None))
        with contextlib.suppress(RuntimeError):  # torch's handler of SIGCHLD raises in the main thread
            killed.kill()
            wait_for(lambda: killed.status() == psutil.STATUS_ZOMBIE, poll_s=0.01)
        assert rows(batches) == list(range(21))


def rows(batches: Any) -> list[int]:
    return [i for batch, valid in batches for i in batch[:valid].tolist()]


def test_an_evaluation_that_is_broken_off_leaves_no_loader_processes() -> None:
    batches = eval_batches(Numbers(64), num_workers=2)
    with closing(iter(batches)) as first:
        next(first)
        assert multiprocessing.active_children()
    assert not multiprocessing.active_children()
    assert sum(valid for _, valid in batches) == 64
    batches.close()


@pytest.mark.slow
def test_loader_processes_die_with_their_worker_and_not_by_ctrl_c() -> None:
    code = """
        import multiprocessing, time
        from torch.utils.data._utils import worker as torch_worker
        torch_worker.MP_STATUS_CHECK_INTERVAL = 90  # torch's own watch would end the loader process after 5 s
        from helpers.ranks.batches import Numbers, train
        batches = train(Numbers(64), num_workers=1, steps=100)
        next(batches)
        print(multiprocessing.active_children()[0].pid, flush=True)
        time.sleep(60)
    """
    worker = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
        stdout=subprocess.PIPE,
    )
    try:
        loader = psutil.Process(int(worker.stdout.readline()))
        loader.send_signal(signal.SIGINT)
        time.sleep(0.2)
        assert loader.status() != psutil.STATUS_ZOMBIE
    finally:
        worker.kill()
        worker.wait(timeout=10)
        worker.stdout.close()
    deadline = time.monotonic() + 60
    while loader.is_running() and loader.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the loader process outlived its worker"
        time.sleep(0.02)

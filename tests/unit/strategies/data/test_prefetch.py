"""Copies of batches that are begun one step ahead, and the streams that they use."""

import contextlib
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest
import torch

from helpers.conformance.cases import Case, assignment
from helpers.conformance.training import make
from helpers.jobs.quick_jobs import digits
from orchestrator.config.redact import Redactor
from orchestrator.strategies.data.prefetch import SideStream, prefetched
from orchestrator.worker.control.control import Outbox, StepGate, Warner
from orchestrator.worker.data.job_data import JobData


def logged_copies(log: list[str]) -> Callable[[Any], Callable[[], Any]]:
    """Copies that write into ``log`` when they begin and when they are used."""

    def begin(batch: Any) -> Callable[[], Any]:
        log.append(f"begin {batch}")

        def use() -> Any:
            log.append(f"use {batch}")
            return batch

        return use

    return begin


def numbers(log: list[str], *, fails_at: int | None = None) -> Generator[int, None, None]:
    try:
        for number in range(3):
            if number == fails_at:
                raise OSError(f"batch {number} is gone")
            yield number
    finally:
        log.append("closed")


def test_the_next_copy_begins_before_a_batch_is_trained_on() -> None:
    log: list[str] = []
    for batch in prefetched(numbers(log), logged_copies(log)):
        log.append(f"train {batch}")
    assert log == [
        "begin 0", "use 0", "begin 1", "train 0", "use 1", "begin 2", "train 1", "use 2", "closed", "train 2"
    ]  # fmt: skip


def test_an_error_waits_for_its_turn() -> None:
    log: list[str] = []
    batches = prefetched(numbers(log, fails_at=2), logged_copies(log))
    assert [next(batches), next(batches)] == [0, 1]
    with pytest.raises(OSError, match="batch 2 is gone"):
        next(batches)


def test_closing_ends_the_reader() -> None:
    log: list[str] = []
    batches = prefetched(numbers(log), logged_copies(log))
    next(batches)
    batches.close()
    assert log[-1] == "closed"


class Stream:
    """A stream of a device that this machine lacks; it writes into ``log`` what it is asked for."""

    def __init__(self, name: str, log: list[str]):
        self.name = name
        self.log = log

    def record_event(self) -> str:
        self.log.append(f"{self.name} records")
        return "event"

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens on the streams of a GPU that computes on a stream named ``main``."""
    log: list[str] = []

    @contextlib.contextmanager
    def within(stream: Stream) -> Iterator[None]:
        log.append(f"enter {stream.name}")
        yield
        log.append(f"leave {stream.name}")

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream("side", log))
    monkeypatch.setattr(torch.cuda, "stream", within)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("main", log))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: log.append(f"used on {stream.name}"))
    return log


def test_the_computing_stream_waits_for_the_copy_and_keeps_its_memory(log: list[str]) -> None:
    batch = [(torch.ones(2), {"mask": torch.zeros(2)})]
    use = SideStream(torch.device("cpu"))(batch)
    assert log == ["enter side", "leave side", "side records"]
    assert use() is batch
    assert log[3:] == ["main waits for event", "used on main", "used on main"]


def test_a_sparse_batch_is_copied_where_it_is_used(log: list[str]) -> None:
    batch = (torch.eye(2).to_sparse(), torch.ones(2))
    assert SideStream(torch.device("cpu"))(batch)() is batch
    assert log == []


def evaluated_on(device: str) -> Iterator[tuple[Any, int]]:
    """The batches of an evaluation of 130 samples, of which a batch has 64."""
    case = Case(job=digits(val_size=130))
    orders = assignment(rank=0, world_size=1, generation=1, store_port=0, run_dir="", case=case)
    outbox = Outbox(Redactor())
    data = JobData(
        case.job,
        orders,
        strategy=make(case, 0),
        device=torch.device(device),
        gate=StepGate(timeout_s=60),
        outbox=outbox,
        warner=Warner(outbox),
    )
    return data.eval_batches("val")


def test_the_next_batch_of_an_evaluation_is_copied_while_one_computes(log: list[str]) -> None:
    copies = []
    for (inputs, target), valid in evaluated_on("meta"):
        log.append(f"evaluate {valid}")
        copies += [inputs, target]
    assert {tensor.device.type for tensor in copies} == {"meta"}
    copy, use = ["enter side", "leave side", "side records"], ["main waits for event"] + ["used on main"] * 2
    assert log == [
        *copy, *use, *copy, "evaluate 64", *use, *copy, "evaluate 64", *use, "evaluate 2"
    ]  # fmt: skip


def test_an_evaluation_on_a_cpu_copies_nothing(log: list[str]) -> None:
    assert [valid for _, valid in evaluated_on("cpu")] == [64, 64, 2]
    assert log == []

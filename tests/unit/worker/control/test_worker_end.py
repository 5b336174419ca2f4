"""How a worker leaves a generation: no outcome waits for it, and whatever breaks then hides nothing."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from helpers.conformance.cases import Case, assignment
from helpers.jobs.quick_jobs import digits
from orchestrator.compat.enqueue_gate import GATE
from orchestrator.worker import failures
from orchestrator.worker.actor import _close, _recoverable_steps
from orchestrator.worker.control import rendezvous
from orchestrator.worker.control.control import AbandonedError
from orchestrator.worker.control.rendezvous import ReleaseError, Teardown
from orchestrator.worker.measure.step_metrics import NonFiniteError
from orchestrator.worker.reports.evaluation import ModelChangedError


def breaks(*_: Any, **__: Any) -> Any:
    raise RuntimeError("the connection is gone")


def nothing() -> None:
    pass


@pytest.fixture
def group() -> Iterator[None]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.usefixtures("group")
def test_errors_at_the_end_are_only_printed(clean: bool, capfd: pytest.CaptureFixture[str]) -> None:
    loop: Any = SimpleNamespace(strategy=SimpleNamespace(close=breaks), recoverable_steps=breaks)
    teardown = Teardown(word_timeout_s=10, timeout_s=60)
    teardown.start(lambda: _close(loop), clean=clean)
    teardown.begin(2, backend="gloo")
    assert not dist.is_initialized()
    assert _recoverable_steps(loop) == {}
    assert capfd.readouterr().err.count("RuntimeError: the connection is gone") == 2


def test_a_worker_that_has_built_no_loop_leaves_too() -> None:
    _close(None)
    assert _recoverable_steps(None) == {}


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.usefixtures("group")
def test_only_a_clean_end_waits_for_other_ranks(clean: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With gloo: ``destroy_process_group`` may wait until all ranks call it."""
    called, released = threading.Event(), threading.Event()
    destroy = dist.destroy_process_group

    def wait_and_destroy() -> None:
        called.set()
        released.wait(20)
        destroy()

    monkeypatch.setattr(dist, "destroy_process_group", wait_and_destroy)
    teardown = Teardown(word_timeout_s=10, timeout_s=10 if not clean else 0.1)
    teardown.start(nothing, clean=clean)
    if clean:
        assert called.wait(10)
        with pytest.raises(ReleaseError, match=r"not released within 0\.1 s"):
            teardown.begin(2, backend="gloo")
        released.set()
    else:
        teardown.begin(2, backend="gloo")
        assert not dist.is_initialized()
        assert not called.is_set()


@pytest.mark.parametrize(
    ("backend", "aborted", "remains"), [("nccl", 2, False), ("nccl", 3, False), ("nccl", 1, True), ("gloo", 2, True)]
)
@pytest.mark.usefixtures("group")
def test_the_driver_aborts_the_groups_of_the_generation_that_it_ends(backend: str, aborted: int, remains: bool) -> None:
    teardown = Teardown(word_timeout_s=60)
    teardown.begin(2, backend=backend)
    teardown.abort(aborted)
    assert dist.is_initialized() == remains
    assert teardown.has_aborted != remains
    teardown.abort(aborted)
    teardown.start(nothing, clean=False)
    teardown.begin(3, backend=backend)
    assert not teardown.has_aborted


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.usefixtures("group")
def test_an_abort_waits_for_a_thread_that_enqueues_but_not_for_one_that_is_stuck(
    blocks: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rendezvous, "ENQUEUE_TIMEOUT_S", 0.1 if blocks else 60)
    inside, aborted, seen = threading.Event(), threading.Event(), []

    def enqueue() -> None:
        with GATE:
            inside.set()
            aborted.wait(60 if blocks else 0.2)
            seen.append(dist.is_initialized())

    GATE.open()
    training = threading.Thread(target=enqueue)
    training.start()
    assert inside.wait(60)
    teardown = Teardown(word_timeout_s=60)
    teardown.begin(2, backend="nccl")
    teardown.abort(2)
    aborted.set()
    training.join(60)
    assert not dist.is_initialized()
    assert seen == [not blocks]
    assert ("still being enqueued" in capfd.readouterr().err) == blocks


@pytest.mark.usefixtures("group")
def test_with_nccl_a_rank_that_has_failed_aborts_at_the_word_of_the_driver() -> None:
    """Until then, the others may take its garbage for gradients."""
    teardown = Teardown(word_timeout_s=10, timeout_s=5)
    teardown.begin(2, backend="nccl")
    closed = threading.Event()
    teardown.start(closed.set, clean=False)
    assert closed.wait(60)
    teardown.abort(1)
    time.sleep(0.2)
    assert dist.is_initialized()
    teardown.abort(2)
    teardown.begin(3, backend="nccl")
    assert not dist.is_initialized()


@pytest.mark.usefixtures("group")
def test_with_nccl_a_clean_end_waits_for_no_rank_but_for_the_next_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer may have died since, and ``destroy_process_group`` would wait for it."""
    monkeypatch.setattr(dist, "destroy_process_group", breaks)
    teardown = Teardown(word_timeout_s=10, timeout_s=5)
    teardown.begin(2, backend="nccl")
    closed = threading.Event()
    teardown.start(closed.set, clean=True)
    assert closed.wait(60)
    time.sleep(0.2)
    assert dist.is_initialized(), "a peer may still receive what this rank has sent"
    teardown.begin(3, backend="nccl")
    assert not dist.is_initialized()


NO_WORD = """
import threading
import torch.distributed as dist
from orchestrator.worker.control.rendezvous import Teardown

store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
teardown = Teardown(word_timeout_s=0.2)
teardown.begin(2, backend="nccl")
teardown.start(lambda: None, clean=False)
threading.Event().wait(20)
raise SystemExit("still there" if dist.is_initialized() else "has aborted")
"""


@pytest.mark.slow  # the imports of a new process
def test_with_nccl_a_rank_that_has_failed_ends_if_the_driver_says_nothing() -> None:
    """If it aborted instead, a peer could take garbage for gradients before the generation is marked as ended."""
    done = subprocess.run([sys.executable, "-c", NO_WORD], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "no order to abort it came from the driver within 0.2 s (cluster.heartbeat_timeout_s)" in done.stderr
    assert "has aborted" not in done.stderr


class SlowToGo:
    """A group whose destructor waits, as that of NCCL does for the watchdog of torch."""

    def __init__(self, may_go: threading.Event, gone: threading.Event):
        self._may_go, self._gone = may_go, gone

    def __del__(self) -> None:
        self._may_go.wait(20)
        self._gone.set()


def test_no_generation_waits_for_the_destructor_of_a_group_of_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    may_go, gone = threading.Event(), threading.Event()
    monkeypatch.setattr(rendezvous, "abort", lambda: [SlowToGo(may_go, gone)])
    teardown = Teardown(word_timeout_s=10, timeout_s=5)
    teardown.begin(2, backend="nccl")
    teardown.abort(2)
    teardown.start(nothing, clean=False)
    teardown.begin(3, backend="nccl")
    assert not gone.is_set()
    may_go.set()
    assert gone.wait(60)


CONNECTION = dist.DistBackendError("NCCL communicator was aborted")
DEVICE = dist.DistBackendError(
    "NCCL error in: NCCLUtils.hpp:268, unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version "
    "2.27.5\n"
    "ncclUnhandledCudaError: Call to CUDA function failed."
)


OF_NCCL2 = [
    dist.DistBackendError("Watchdog caught collective operation timeout: NCCL operation timed out"),
    dist.DistBackendError("NCCL operation failed"),
    RuntimeError("NCCL operation timed out"),
    RuntimeError("NCCL communicator was aborted after a previous error"),
    RuntimeError("NCCL Async Error: remote process exited or there was a network error \nNCCL Last Error: socket"),
    RuntimeError("NCCL GroupEnd failed: unhandled system error (run with NCCL_DEBUG=INFO) \nNCCL Last Error: "),
    RuntimeError("Failed to initialize NCCL communicator: internal error"),
]
"""What the other backend of torch 2.15 says after the loss of a rank."""


@pytest.mark.parametrize(
    ("error", "after_abort", "collateral"),
    [
        (CONNECTION, False, True),
        (DEVICE, False, False),
        (DEVICE, True, False),
        *((error, False, True) for error in OF_NCCL2),
        (RuntimeError("NCCL Async Error: unhandled cuda error \nNCCL Last Error: "), False, False),
        (dist.DistStoreError("wait timeout after 300000ms, keys: /0//nccl_storekey_0"), False, True),
        (RuntimeError("a job's own text about NCCL"), False, False),
        (AbandonedError("ended"), False, True),
        (IndexError("index 8233871 is out of range"), False, False),
        (IndexError("index 8233871 is out of range"), True, True),
        (NonFiniteError("the loss became nan", 7), False, False),
        (NonFiniteError("the loss became nan", 7), True, True),
        (failures.DatasetError("no file"), True, False),
        (ModelChangedError("job.sample"), True, False),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), True, False),
        (KeyboardInterrupt(), True, False),
    ],
)
def test_only_errors_that_may_come_from_an_abort_are_put_down_to_it(
    error: BaseException, after_abort: bool, collateral: bool, tmp_path: Any
) -> None:
    orders = assignment(rank=0, world_size=1, generation=1, store_port=0, run_dir="", case=Case(job=digits()))
    loop: Any = SimpleNamespace(position=SimpleNamespace(step=9), job=digits(), trial=None)
    failure = failures.describe_failure(error, orders, loop, tmp_path / "log", after_abort=after_abort)
    assert failure.collateral == collateral
    assert bool(failure.traceback) == (not isinstance(error, failures.EXPLAINED))
    is_nan = isinstance(error, NonFiniteError)
    assert failure.final == (
        not collateral and isinstance(error, (*failures.EXPLAINED, ModelChangedError, NonFiniteError))
    )
    assert failures.last_step(error, failure, loop) == (6 if is_nan and not collateral else 9)


def test_the_text_of_an_error_can_be_encoded(tmp_path: Any) -> None:
    orders = assignment(rank=0, world_size=1, generation=1, store_port=0, run_dir="", case=Case(job=digits()))
    error = RuntimeError("no file a\udcff")
    error.__cause__ = ValueError("\ud800")
    failure = failures.describe_failure(error, orders, None, tmp_path / "log", after_abort=False)
    assert failure.message == r"RuntimeError: no file a\udcff"
    assert r"ValueError: \ud800" in failure.traceback


def test_out_of_memory_is_explained_also_before_there_is_a_model(tmp_path: Any) -> None:
    orders = assignment(rank=0, world_size=1, generation=1, store_port=0, run_dir="", case=Case(job=digits()))
    error = torch.OutOfMemoryError("CUDA out of memory in a library.")
    for loop in (None, SimpleNamespace(strategy=SimpleNamespace(tensor_sizes=breaks), job=digits(), trial=None)):
        failure = failures.describe_failure(error, orders, loop, tmp_path / "log", after_abort=False)  # type: ignore[arg-type]
        assert failure.message.startswith("CUDA out of memory in a library")
        assert not failure.collateral

"""Checkpoints that are due while the one before is still being written."""

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.conformance.cases import CLUSTER, RECOVERY, SINGLE, Case, assignment, config_of
from helpers.conformance.training import close_strategies, make
from helpers.files.golden import Golden
from helpers.jobs.quick_jobs import digits
from orchestrator.config.redact import Redactor
from orchestrator.protocol.events import CheckpointSaved, Event, Warned
from orchestrator.records.run_dir import RunDir
from orchestrator.worker.control.control import Outbox, Warner
from orchestrator.worker.reports import checkpoints
from orchestrator.worker.reports.checkpoints import Checkpoints, lost_timeout_s

CASE = Case(job=digits(), options=SINGLE)


@pytest.fixture
def outbox() -> Outbox:
    return Outbox(Redactor())


@pytest.fixture
def saving(tmp_path: Path, outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> Iterator[Checkpoints]:
    """What saves the checkpoints of one worker; none is complete before its fence file, a pipe, is written to."""
    monkeypatch.setattr(checkpoints, "BUSY_WAIT_S", 0.05)
    orders = assignment(rank=0, world_size=1, generation=1, store_port=0, run_dir=str(tmp_path), case=CASE)
    fence = RunDir(tmp_path).fence_file
    fence.rename(fence.with_suffix(".whole"))
    os.mkfifo(fence)
    yield Checkpoints(orders, strategy=make(CASE, 0), outbox=outbox, warner=Warner(outbox))
    close_strategies()


def complete(tmp_path: Path) -> None:
    """Let the checkpoint that is being written become complete, and later ones too."""
    fence = RunDir(tmp_path).fence_file
    token = fence.with_suffix(".whole").read_text()
    with fence.open("w") as pipe:
        fence.with_suffix(".whole").replace(fence)
        pipe.write(token)


def save(saving: Checkpoints, step: int, *, last: bool = False) -> None:
    saving.save(step=step, samples_consumed=step, last=last, metadata={})


def reported(outbox: Outbox) -> list[Event]:
    return list(outbox.collect({}).events)


def test_a_checkpoint_is_skipped_while_another_is_written_and_the_last_one_never(
    saving: Checkpoints, outbox: Outbox, tmp_path: Path, golden: Golden
) -> None:
    for step in (1, 2, 3):
        save(saving, step)
    (warning,) = reported(outbox)
    assert isinstance(warning, Warned)
    golden.says(warning.message)
    completion = threading.Timer(0.3, complete, [tmp_path])
    completion.start()
    save(saving, 4, last=True)
    completion.join(60)
    assert saving.finish(timeout_s=10) is None
    saved = [event.step for event in reported(outbox) if isinstance(event, CheckpointSaved)]
    assert saved == [1, 4]


def test_each_checkpoint_is_reported_with_its_own_stall(
    saving: Checkpoints, outbox: Outbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "BUSY_WAIT_S", 10.0)
    began = time.perf_counter()
    save(saving, 1)
    own_ms = (time.perf_counter() - began) * 1e3
    completion = threading.Timer(0.5, complete, [tmp_path])
    submit = saving._writer.submit

    def submit_and_complete(*args: Any, **options: Any) -> Any:
        completion.start()  # its stall is being counted already
        return submit(*args, **options)

    monkeypatch.setattr(saving._writer, "submit", submit_and_complete)
    save(saving, 2)
    completion.join(60)
    assert saving.finish(timeout_s=10) is None
    stalls_ms = {event.step: event.stall_ms for event in reported(outbox) if isinstance(event, CheckpointSaved)}
    assert stalls_ms[1] <= own_ms
    assert stalls_ms[2] > 400, "the second waited for the first"


@pytest.mark.parametrize(("heartbeat_timeout_s", "hang_max_s"), [(60, 20), (5, 20)])
def test_the_last_checkpoint_does_not_give_up_before_one_that_lacks_the_part_of_a_lost_rank(
    heartbeat_timeout_s: float, hang_max_s: float
) -> None:
    config = config_of(
        CASE,
        1,
        cluster=replace(CLUSTER, heartbeat_timeout_s=heartbeat_timeout_s),
        recovery=replace(RECOVERY, hang_max_s=hang_max_s),
    )
    assert lost_timeout_s(config) < hang_max_s
    assert lost_timeout_s(config) <= heartbeat_timeout_s

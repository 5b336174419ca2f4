"""The thread that writes checkpoints behind the training, and the fence that it asks."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.files.checkpoints import best_at, make_state, never
from helpers.files.golden import Golden
from helpers.machines.disks import freezable_disk
from orchestrator.state import checkpoint_writer
from orchestrator.state.best import BEST, BestSoFar
from orchestrator.state.checkpoint import list_checkpoints, load, save, step_of
from orchestrator.state.checkpoint_store import CheckpointStore
from orchestrator.state.checkpoint_writer import CheckpointWriter, WriteFailed, Written
from orchestrator.state.fence import Fence, FencedError
from orchestrator.storage.remote import Remote


@pytest.fixture
def permits(monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """Writers write one checkpoint for each release."""
    semaphore = threading.Semaphore(0)

    def save_if_permitted(*args: Any, **options: Any) -> Path:
        assert semaphore.acquire(timeout=60)
        return save(*args, **options)

    monkeypatch.setattr(checkpoint_writer, "save", save_if_permitted)
    return semaphore


def test_the_writer_works_behind_and_one_at_a_time(tmp_path: Path, permits: threading.Semaphore) -> None:
    writer = CheckpointWriter(tmp_path, keep=2, run_uid="run")
    assert writer.buffers() is None
    states = [make_state(step) for step in (1, 2, 3)]
    writer.submit(states[0])
    assert writer.pending() is not None, "submit() waited for the disk"
    assert writer.buffers() is None, "it is still being written"
    threading.Timer(0.5, permits.release).start()
    writer.submit(states[1])
    (first,) = writer.results()
    assert isinstance(first, Written)
    assert first == Written(
        step=1,
        path=tmp_path / "step-00000001",
        seconds=first.seconds,
        stall_ms=first.stall_ms,
        size_bytes=states[0].size_bytes,
    )
    assert 0 < first.seconds < 60
    assert writer.buffers() is states[0]
    assert writer.buffers() is None
    permits.release(2)
    writer.submit(states[2])
    assert writer.drain(60) is None
    assert [r.step for r in writer.results()] == [2, 3]
    assert writer.results() == []
    assert [p.name for p in list_checkpoints(tmp_path)] == ["step-00000002", "step-00000003"]
    assert writer.close(60) is None
    assert torch.equal(load(tmp_path / "step-00000003").model["w"], states[2].model["w"])


def test_a_write_that_takes_too_long_costs_the_next_checkpoint_alone(
    tmp_path: Path, permits: threading.Semaphore
) -> None:
    writer = CheckpointWriter(tmp_path, keep=2, run_uid="run")
    late = make_state(2)
    writer.submit(make_state(1))
    busy_with = writer.submit(late, timeout_s=0)
    assert busy_with.step == 1
    assert writer.results() == []
    assert writer.buffers() is late
    permits.release()
    assert writer.close(60) is None, "close() waits for what was submitted"
    assert [r.step for r in writer.results()] == [1]
    assert CheckpointStore(tmp_path, None).find_newest(never) == tmp_path / "step-00000001"


@pytest.mark.slow
def test_a_slow_write_is_waited_for_while_it_moves_and_a_stuck_one_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stall_s, stills_s = 3.0, itertools.repeat(0.6, 12)  # after most of its 18 chunks
    with freezable_disk(tmp_path, megabytes=256) as disk:
        writer = CheckpointWriter(disk.folder, keep=2, run_uid="run")
        state = make_state(1, megabytes=150)
        count = writer._count_progress

        def count_slowly() -> None:
            count()
            time.sleep(next(stills_s, 0.0))

        monkeypatch.setattr(writer, "_count_progress", count_slowly)
        disk.freeze()
        writer.submit(state)
        stuck = writer.drain(0.2)
        assert stuck.step == 1
        began = time.monotonic()
        disk.thaw()
        signs: list[float] = []
        assert writer.drain(stall_s, on_progress=lambda: signs.append(time.monotonic())) is None
        assert time.monotonic() - began > stall_s, "the write was too fast to show anything"
        assert signs
        assert writer.close(30) is None
        assert CheckpointStore(disk.folder, None).find_newest(never) == disk.folder / "step-00000001"


def test_the_writer_goes_on_after_an_error(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    root.write_text("in the way")
    writer = CheckpointWriter(root, keep=1, run_uid="run")
    writer.submit(make_state(1))
    assert writer.drain(30) is None
    assert writer.results() == [WriteFailed(step=1, reason=f"File exists: {root}")]
    root.unlink()
    writer.submit(make_state(2))
    assert writer.close(30) is None
    (written,) = writer.results()
    assert isinstance(written, Written)


def test_a_fenced_worker_saves_nothing(tmp_path: Path, golden: Golden) -> None:
    file, root = tmp_path / "fence", tmp_path / "checkpoints"
    file.write_text('{"generation": "first"}')
    fence = Fence(file, token="first")
    writer = CheckpointWriter(root, keep=2, run_uid="run", fence=fence)
    writer.submit(make_state(3))
    assert writer.drain(30) is None
    file.write_text('{"generation": "second"}')
    writer.submit(make_state(4))
    assert writer.drain(30) is None
    fence.token = "second"
    writer.submit(make_state(5))
    assert writer.close(30) is None
    first, fenced, rejoined = writer.results()
    assert isinstance(first, Written)
    assert isinstance(fenced, WriteFailed)
    golden.says(fenced.reason)
    assert isinstance(rejoined, Written)
    assert sorted(p.name for p in root.iterdir()) == ["step-00000003", "step-00000005"]


@pytest.fixture(params=["directory", "store"])
def pruning(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pruning]:
    if request.param == "store":
        request.applymarker(pytest.mark.slow)
    made = Pruning(tmp_path, Remote(f"file://{tmp_path}/store", timeout_s=5) if request.param == "store" else None)
    yield made
    made.writer.close(10)


class Pruning:
    """A writer that keeps one checkpoint and the best. Its fence makes those fail that are asked to."""

    def __init__(self, folder: Path, remote: Remote | None):
        (folder / "fence").write_text('{"generation": "current"}')
        self.fence = Fence(folder / "fence", token="current")
        self.writer = CheckpointWriter(folder / "here", keep=1, run_uid="run", fence=self.fence, remote=remote)
        self.store = CheckpointStore(folder / "here", remote)

    def save(self, step: int, *, best: int | None, fails: bool = False) -> list[int]:
        """The steps of the checkpoints that there are afterwards."""
        self.fence.token = "replaced" if fails else "current"
        self.writer.submit(make_state(step, best=best))
        assert self.writer.drain(10) is None
        assert [type(result) for result in self.writer.results()] == [WriteFailed if fails else Written]
        return [step_of(name) for name in self.store.list()]


@pytest.mark.slow
@pytest.mark.parametrize(
    "later",
    [[(30, 30, True, [10, 20]), (40, 30, False, [10, 40])], [(30, None, False, [10, 30]), (40, None, False, [10, 40])]],
    ids=["a better one cannot be written", "a part of the run follows no metric"],
)
def test_the_best_is_kept_until_a_better_one_is_written(
    pruning: Pruning, later: list[tuple[int, int | None, bool, list[int]]]
) -> None:
    for step, best, fails, kept in [(10, 10, False, [10]), (20, 10, False, [10, 20]), *later]:
        assert pruning.save(step, best=best, fails=fails) == kept
    found = pruning.store.best()
    assert (found.step, found.value) == (10, 0.1)
    assert pruning.save(50, best=50) == [50]


@pytest.mark.slow
def test_what_is_known_after_a_checkpoint_is_entered_into_it(pruning: Pruning) -> None:
    assert pruning.save(10, best=10) == [10]
    assert pruning.save(20, best=10) == [10, 20]
    pruning.writer.amend(20, {BEST: best_at(20).to_json()})
    assert pruning.store.list() == ["step-00000020"]
    found = load(pruning.store.fetch("step-00000020"))
    assert BestSoFar.from_meta(found.meta) == best_at(20)
    assert (found.step, found.samples_consumed, found.meta["note"]) == (20, 200, "x" * 10)
    pruning.fence.token = "replaced"
    with pytest.raises(FencedError):
        pruning.writer.amend(20, {BEST: best_at(10).to_json()})
    assert BestSoFar.from_meta(load(pruning.store.fetch("step-00000020")).meta) == best_at(20)


@pytest.mark.parametrize("text", ["", "[]", "{}"])
def test_a_damaged_fence_is_named_and_lets_nobody_save(tmp_path: Path, text: str) -> None:
    fence = Fence(tmp_path / "fence")
    (tmp_path / "fence").write_text(text)
    with pytest.raises(ValueError, match=r"fence is damaged"):
        fence.may_save()

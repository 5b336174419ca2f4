"""Rows of a ``ray.data.Dataset``: the losses of a plain loop over them, whatever is lost, and from any position."""

import threading
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest
import ray

from helpers.conformance.reference import plain_losses
from helpers.jobs import row_jobs
from helpers.jobs.row_jobs import RowJob, write_files, write_images
from helpers.records.runs import events, in_campaign, losses, wait_for_step
from orchestrator.compat.ray import datasets
from orchestrator.features.feeding.client import FedSplit, Feeding
from orchestrator.features.feeding.feed import Request, Share
from orchestrator.features.feeding.feeder import Feeder
from orchestrator.features.feeding.rows import digest
from orchestrator.strategies.data.columns import Columns, joined
from orchestrator.user_code.errors import JobError
from orchestrator.worker.data.data_loader import DataError, ReadFailure
from orchestrator.worker.data.stream import Mark

STEPS, BATCH = 30, 36
WORDS = (
    "job._target_=helpers.jobs.row_jobs.RowJob", "strategy=ddp", f"train.steps={STEPS}",
    f"train.global_batch_size={BATCH}", "train.log_every=1", "recovery.backoff_s=0.1",
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_files(tmp_path / "rows")
    return tmp_path / "rows"


@pytest.fixture(scope="module")
def expected() -> dict[int, float]:
    return plain_losses(RowJob(), batch=BATCH, steps=STEPS)


def warnings(run_dir: Path) -> list[str]:
    return [event["message"] for event in events(run_dir, "warned") if "data" in event["message"]]


@pytest.mark.parametrize(
    ("kind", "alone"), [("rows", "stream"), *in_campaign(("function", "windows"), ("images", "pixels"))]
)
def test_a_run_resumes_within_an_epoch_on_another_number_of_workers(
    run: Any, folder: Path, kind: str, alone: str, tmp_path: Path
) -> None:
    expected = plain_losses(RowJob(kind=alone), batch=BATCH, steps=STEPS)
    if kind == "images":
        write_images(folder := tmp_path / "images")
    words = (*WORDS, f"job.kind={kind}", f"job.folder={folder}", "checkpoint.every=4", "train.eval_every=0",
             f"data.shuffle_window={64 if kind == 'function' else 0}")  # fmt: skip
    first = run(*words, "strategy.num_workers=2", "recovery.max_failures=0", "recovery.chaos=[kill@19:0]")
    assert first.exit_code == 1, first.reason
    resumed = run(*words, f"resume={first.run_dir}", "strategy.num_workers=1", "recovery.chaos=[]")
    assert resumed.exit_code == 0, resumed.reason
    assert losses(resumed.run_dir) == pytest.approx(expected, rel=1e-4)
    again = [warning for warning in warnings(resumed.run_dir) if "rows of the epoch were read again in" in warning]
    assert len(again) == len(warnings(resumed.run_dir)) == (kind == "images")


def kill_feeder(folder: Path) -> None:
    wait_for_step(folder, 20)
    (name,) = [actor for actor in ray.util.list_named_actors(all_namespaces=True) if "/feeder" in actor["name"]]
    ray.kill(ray.get_actor(name["name"], namespace=name["namespace"]))


def test_a_lost_reader_rank_and_feeder_change_no_loss(
    run: Any, folder: Path, expected: dict[int, float], tmp_path: Path
) -> None:
    killer = threading.Thread(target=kill_feeder, args=(tmp_path,))
    killer.start()
    result = run(*WORDS, "strategy.num_workers=2", "job.kind=dying", f"job.folder={folder}",
                 f"job.mark={tmp_path / 'died'}", "job.pause_ms=50", "recovery.chaos=[kill@9:0]",
                 "train.eval_every=15")  # fmt: skip
    killer.join(10)
    assert not killer.is_alive()
    assert result.exit_code == 0, result.reason
    assert (tmp_path / "died").exists()
    assert (result.summary["restarts"], result.summary["steps_lost"]) == (1, 0)
    assert losses(result.run_dir) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("read", ["run", *in_campaign("node")])
def test_a_stream_is_read_once_for_all_ranks(run: Any, expected: dict[int, float], read: str) -> None:
    result = run(*WORDS, "strategy.num_workers=2", f"data.read={read}", "recovery.chaos=[kill@9:0]",
                 "data.num_workers=1", "train.eval_every=15")  # fmt: skip
    assert result.exit_code == 0, result.reason
    assert losses(result.run_dir) == pytest.approx(expected, rel=1e-4)
    assert result.summary["steps_lost"] == 0


def taken(job: RowJob, position: int, mark: Mark | None = None) -> tuple[Share, Columns]:
    """The global batch at a position, from a feeder in this process that begins there."""
    ray.cloudpickle.register_pickle_by_value(row_jobs)  # this process does not lend its path to tasks
    feeder = Feeder(job, seed=0, window=0, count=BATCH)
    asked = Request(
        asker=0, generation=1, position=position, count=BATCH, first=0, end=BATCH, keep=0, ahead=0, mark=mark
    )
    try:
        while (share := feeder.take("train", asked)) and isinstance(share, Share) and share.parts is None:
            pass
        if isinstance(share, ReadFailure):
            raise share.error()
        assert share is not None
        assert share.parts is not None
        return share, joined([part.load(datasets.columns) for part in share.parts])
    finally:
        feeder.close("train")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("failing", "train data, in a task of Ray Data: ValueError: this row is broken"),
        ("unseeded", "job.dataset('train'): random_shuffle without a seed has another order each time that it is read"),
        ("empty", "job.dataset('train'): the dataset has no rows; give it at least one"),
        ("missing", "rows without a value in the column y; fill them in a function of the data"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(folder: Path, kind: str, message: str) -> None:
    with pytest.raises((DataError, JobError, ValueError)) as refused:
        taken(RowJob(kind=kind, folder=str(folder)), 0)
    assert message in str(refused.value)


def test_a_rank_refuses_blocks_of_several_kinds(folder: Path) -> None:
    split = FedSplit(cast(Feeding, None), "train", None)
    assert split._columns(ray.put(pa.table({"x": [1.0], "y": [1]})))["y"].tolist() == [1]
    for other in ({"x": [1.0]}, {"x": [1.0], "y": [1.0]}):
        with pytest.raises(ValueError, match="rows with several kinds of columns"):
            split._columns(ray.put(pa.table(other)))


@pytest.mark.parametrize(
    ("kind", "note"),
    [
        ("rows", None),
        ("halved", None),
        ("drawn", "are not what they were before: a function of the data draws at random"),
    ],
)
def test_rows_before_a_checkpoint_are_skipped_if_what_follows_is_the_same(
    folder: Path, kind: str, note: str | None
) -> None:
    """A function may return fewer rows than it gets, so that the counts of files tell nothing."""
    job = RowJob(kind=kind, folder=str(folder))
    before, rows = taken(job, 2 * BATCH)
    assert before.mark is not None
    assert before.mark.state == {"row": 3 * BATCH}
    _, following = taken(job, 3 * BATCH)
    seen = [2 * BATCH, BATCH, digest(rows)]
    share, found = taken(job, 3 * BATCH, Mark(position=3 * BATCH, epoch=0, state={"row": 3 * BATCH, "seen": seen}))
    assert found.columns["y"].tolist() == following.columns["y"].tolist()
    assert share.notes == () if note is None else any(note in text for text in share.notes)

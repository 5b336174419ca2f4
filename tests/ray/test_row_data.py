"""Rows of a ``ray.data.Dataset``: the losses of a plain loop over them, whatever is lost, and from any position."""

import re
import threading
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest
import ray
import torch
from ray.util.placement_group import placement_group, remove_placement_group

from helpers.conformance.reference import numbered, plain_losses, plainly
from helpers.jobs import row_jobs
from helpers.jobs.library_streams import LIBRARIES, LibraryRows
from helpers.jobs.row_jobs import ROWS, RowJob, TokenRows, write_files, write_images, write_tokens
from helpers.records.runs import events, in_campaign, losses, series, wait_for_step
from orchestrator.compat.ray import counted_sources, datasets
from orchestrator.driver.preflight.child_process import in_child
from orchestrator.features import feeding
from orchestrator.features.feeding.client import FedSplit, Feeding
from orchestrator.features.feeding.feed import Request, Share
from orchestrator.features.feeding.feeder import Feeder
from orchestrator.features.feeding.rows import digest
from orchestrator.strategies.data.columns import Columns, joined
from orchestrator.strategies.data.datasets import NeedsFeederError, opened_dataset
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
    ("kind", "alone"),
    [("rows", "stream"), *in_campaign(("function", "windows"), ("images", "pixels"), ("sieved", "stream"))],
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
    assert len(again) == len(warnings(resumed.run_dir)) == (kind == "sieved")


@pytest.mark.campaign
@pytest.mark.parametrize("kind", LIBRARIES)
def test_a_stream_of_a_library_resumes_within_an_epoch_on_another_number_of_workers(
    run: Any, tmp_path: Path, kind: str
) -> None:
    write, _ = LIBRARIES[kind]
    write(folder := tmp_path / "rows")
    words = (*WORDS, "job._target_=helpers.jobs.library_streams.LibraryRows", f"job.kind={kind}",
             f"job.folder={folder}", "data.read=run", "checkpoint.every=4")  # fmt: skip
    first = run(*words, "strategy.num_workers=2", "recovery.max_failures=0", "recovery.chaos=[kill@19:0]")
    assert first.exit_code == 1, first.reason
    resumed = run(*words, f"resume={first.run_dir}", "strategy.num_workers=1", "recovery.chaos=[]")
    assert resumed.exit_code == 0, resumed.reason
    expected = plain_losses(LibraryRows(kind=kind, folder=str(folder)), batch=BATCH, steps=STEPS)
    assert losses(resumed.run_dir) == pytest.approx(expected, rel=1e-4)
    again = [warning for warning in warnings(resumed.run_dir) if "reading past" in warning]
    assert len(again) == (kind == "webdataset")


LAYOUTS = {
    "single": ("single",),
    "ddp": ("ddp", "num_workers=3"),
    "fsdp": ("fsdp", "num_workers=2"),
    "hsdp": ("hsdp", "num_workers=4", "shard_size=2"),
    "pipeline": ("pipeline", "num_workers=2", "num_microbatches=2"),
    "ddp_pipeline": ("ddp_pipeline", "num_workers=4", "num_microbatches=2"),
    "tensor in stages": ("mesh", "num_workers=4", "tensor=2", "pipeline=2", "num_microbatches=2"),
    "replicas of context": ("mesh", "num_workers=4", "context=2", "replicate=2"),
}


@pytest.mark.parametrize("name", [*in_campaign(*[(name,) for name in LAYOUTS])])
def test_rows_have_the_same_losses_under_every_strategy(run: Any, tmp_path: Path, name: str) -> None:
    """Also in evaluations, which end with a part of a batch."""
    write_tokens(folder := tmp_path / "rows")
    strategy, *keys = LAYOUTS[name]
    words = ("job._target_=helpers.jobs.row_jobs.TokenRows", "train.steps=14", "train.global_batch_size=12",
             "train.log_every=1", "train.eval_every=7", "train.precision=fp32", "checkpoint.every=0")  # fmt: skip
    result = run(*words, f"job.folder={folder}", f"strategy={strategy}", "cluster.cpus_per_worker=0.5",
                 *(f"strategy.{key}" for key in keys))  # fmt: skip
    assert result.exit_code == 0, result.reason
    job = TokenRows()
    trained = plainly(job, batch=12, steps=14)
    assert losses(result.run_dir) == pytest.approx(numbered(trained), rel=1e-4)
    inputs, target = job.collate(list(job.dataset("val")))
    with torch.no_grad():
        loss = float(job.loss(trained.model.eval()(inputs), target))
    assert series(result.run_dir, "val/loss")[14] == pytest.approx(loss, rel=1e-4)


@pytest.mark.campaign
@pytest.mark.parametrize(("kind", "read", "of_sizes"), [("rows", "rank", (1, 3)), ("stream", "node", (2, 4))])
def test_a_run_that_grows_reads_on_at_the_next_row(
    run: Any, folder: Path, expected: dict[int, float], tmp_path: Path, kind: str, read: str, of_sizes: tuple[int, int]
) -> None:
    """A CPU is always left for tasks: the run does not grow to the fourth worker. What reads a stream needs none."""
    held = placement_group([{"CPU": 1.5}], name="another user's")
    assert held.wait(30)

    def release() -> None:
        wait_for_step(tmp_path, 8)
        remove_placement_group(held)

    releaser = threading.Thread(target=release, daemon=True)
    releaser.start()
    result = run(*WORDS, "strategy.num_workers=[1,4]", f"job.kind={kind}", f"data.read={read}",
                 "job.pause_ms=500", f"job.folder={folder}", "train.eval_every=0")  # fmt: skip
    releaser.join(10)
    assert result.exit_code == 0, result.reason
    sizes = [len(event["workers"]) for event in events(result.run_dir, "generation_started")]
    assert (sizes[0], max(sizes)) == of_sizes
    assert losses(result.run_dir) == pytest.approx(expected, rel=1e-4)


def test_workers_that_reserve_every_cpu_are_refused_with_the_numbers(run: Any, folder: Path) -> None:
    result = run(*WORDS, "strategy.num_workers=2", "cluster.cpus_per_worker=2", "job.kind=rows", f"job.folder={folder}")
    assert result.exit_code != 0
    assert "4 of the 4 CPUs of the cluster are reserved" in result.reason


def kill_feeder(folder: Path) -> None:
    wait_for_step(folder, 20)
    (name,) = [actor for actor in ray.util.list_named_actors(all_namespaces=True) if "/feeder" in actor["name"]]
    ray.kill(ray.get_actor(name["name"], namespace=name["namespace"]))


@pytest.mark.parametrize(("kind", "read"), [("dying", "rank"), *in_campaign(("stream", "node"), ("stream", "run"))])
def test_a_lost_reader_rank_and_feeder_change_no_loss(
    run: Any, folder: Path, expected: dict[int, float], tmp_path: Path, kind: str, read: str
) -> None:
    killer = threading.Thread(target=kill_feeder, args=(tmp_path,))
    killer.start()
    result = run(*WORDS, "strategy.num_workers=2", f"job.kind={kind}", f"data.read={read}", f"job.folder={folder}",
                 f"job.mark={tmp_path / 'died'}", "job.pause_ms=50", "recovery.chaos=[kill@9:0]",
                 "train.eval_every=15")  # fmt: skip
    killer.join(10)
    assert not killer.is_alive()
    assert result.exit_code == 0, result.reason
    assert (tmp_path / "died").exists() == (kind == "dying")
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
    try:
        return asked(feeder, position, mark)
    finally:
        feeder.close("train")


def asked(feeder: Feeder, position: int, mark: Mark | None = None) -> tuple[Share, Columns]:
    request = Request(
        asker=0, generation=1, position=position, count=BATCH, first=0, end=BATCH, keep=position, ahead=0, mark=mark
    )
    while (share := feeder.take("train", request)) and isinstance(share, Share) and share.parts is None:
        pass
    if isinstance(share, ReadFailure):
        raise share.error()
    assert share is not None
    assert share.parts is not None
    return share, joined([part.load(datasets.columns) for part in share.parts])


def batches(job: RowJob, count: int, *, window: int, limit: int | None) -> list[Any]:
    """The first inputs of each of the first global batches."""
    ray.cloudpickle.register_pickle_by_value(row_jobs)
    feeder = Feeder(job, seed=0, window=window, count=BATCH, limit=limit)
    try:
        return [asked(feeder, BATCH * number)[1].columns["x"].tolist() for number in range(count)]
    finally:
        feeder.close("train")


@pytest.mark.parametrize("window", [0, 64])
def test_a_limit_leaves_the_first_rows_of_the_first_epoch_in_every_epoch(folder: Path, window: int) -> None:
    job = RowJob(kind="rows", folder=str(folder))
    whole, limited = (batches(job, 4, window=window, limit=limit) for limit in (None, 2 * BATCH))
    assert limited == whole[:2] * 2


@pytest.mark.parametrize(("kind", "rows"), [
    ("rows", ROWS), ("function", ROWS), ("filtered", None), ("narrowed", None), ("endless", 1500)
])  # fmt: skip
def test_rows_of_an_epoch_are_known_or_counted(folder: Path, kind: str, rows: int | None) -> None:
    ray.cloudpickle.register_pickle_by_value(row_jobs)
    job = RowJob(kind=kind, folder=str(folder))
    expected = rows or int(row_jobs.columns()["y"].sum())
    up_to = 1500 if kind == "endless" else None
    assert feeding.length(job, "train", 0, up_to=up_to, limit_s=100) == expected
    assert feeding.length(job, "train", 0, up_to=10, limit_s=100) == 10
    if kind == "endless":
        text = feeding.length(job, "train", 0, up_to=None, limit_s=0)
        assert re.fullmatch(
            "has no known length: [0-9,]+ rows were counted in 0 s, and there are more; .* no end", str(text)
        )


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("failing", "train data, in a task of Ray Data: ValueError: this row is broken"),
        ("unseeded", "job.dataset('train'): random_shuffle without a seed has another order each time that it is read"),
        ("empty", "job.dataset('train'): the dataset has no rows; give it at least one"),
        ("missing", "rows without a value in the column y; fill them in a function of the data"),
        ("types", "job.dataset('train'): rows of several schemas (x0: double, x1: float, "),
        ("schemas", "job.dataset('train'): rows of several schemas (Unable to merge: Field x0 has incompatible types"),
        (
            "wrong",
            "train data, in a task of Ray Data: ValueError: The `fn` you passed to `map_batches` returned a value",
        ),
        ("unmade", "train data, in a task of Ray Data: RuntimeError: no vocabulary"),
        ("crowded", "keeps actors, 5 of 1 CPU, for which the nodes have no room: 0 of the 4 CPUs of the cluster are"),
        ("iterator", "job.dataset('train') returns a DataIteratorImpl; let it return a ray.data.Dataset"),
        ("two", "job.dataset('train') returns a function that needs more; let it take the epoch alone"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(folder: Path, kind: str, message: str) -> None:
    with pytest.raises((DataError, JobError, ValueError)) as refused:
        taken(RowJob(kind=kind, folder=str(folder)), 2 * BATCH)
    assert message in str(refused.value)
    assert "Traceback" not in str(refused.value)
    if kind in ("failing", "wrong", "unmade"):
        known = getattr(refused.value, "own_error", None)
        assert known is not None, "it would come again"
        assert known.comes_again


def test_a_rank_refuses_blocks_of_several_kinds(folder: Path) -> None:
    split = FedSplit(cast(Feeding, None), "train", None)
    assert split._columns(ray.put(pa.table({"x": [1.0], "y": [1]})))["y"].tolist() == [1]
    for other in ({"x": [1.0]}, {"x": [1.0], "y": [1.0]}):
        with pytest.raises(ValueError, match="rows with several kinds of columns"):
            split._columns(ray.put(pa.table(other)))


@pytest.mark.parametrize("kind", ["rows", "images", "arrow", "range"])
def test_a_fork_of_a_connected_process_learns_at_once_that_only_tasks_read_the_data(folder: Path, kind: str) -> None:
    """Ray has no threads there. A process that has read such data knows the functions that ask the cluster."""
    if kind == "images":
        write_images(folder / "images")
    job = RowJob(kind=kind, folder=str(folder / "images" if kind == "images" else folder))
    assert job.dataset("train") is not None
    with pytest.raises(NeedsFeederError):
        in_child(lambda: opened_dataset(job, "train", 0), timeout_s=20)


@pytest.mark.parametrize(
    ("kind", "before", "skipped"), [("rows", 330, 325), ("rows", 24, 0), ("arrow", 330, 300), ("images", 33, 33),
                                    ("sieved", 330, 0), ("narrowed", 150, 0)]
)  # fmt: skip
def test_what_is_before_a_row_is_left_out_unread_and_there_in_the_next_epoch(
    folder: Path, tmp_path: Path, kind: str, before: int, skipped: int
) -> None:
    """A dataset of a job may be one object for all epochs."""
    if kind == "images":
        write_images(folder := tmp_path / "images")
    ray.cloudpickle.register_pickle_by_value(row_jobs)
    with datasets.in_order():
        dataset = RowJob(kind=kind, folder=str(folder)).dataset("train")
        datasets.prepare(dataset, cpus=None, execution=0)
        rows = list(map(repr, dataset.take_all()))
        left, found = counted_sources.without_first(dataset, before)
        assert found == skipped
        assert list(map(repr, left.take_all())) == rows[skipped:]
        assert list(map(repr, dataset.take_all())) == rows


@pytest.mark.parametrize(
    ("kind", "note"),
    [
        ("rows", None),
        ("arrow", None),
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

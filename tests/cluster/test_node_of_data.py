"""Rows on a store, read on a node without a worker by a run that is killed and resumed; a stream read once per node."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from pyarrow.fs import LocalFileSystem, S3FileSystem, copy_files
from ray.cluster_utils import Cluster

from helpers.conformance.reference import plain_losses
from helpers.jobs.row_jobs import RowJob, write_files, write_images, write_texts
from helpers.records.runs import events, losses, wait_for, wait_for_step
from helpers.servers.object_store import BUCKET, S3Server, s3  # noqa: F401 - s3 is a fixture
from orchestrator.compat.ray.side_effects import without_services

HEALTH = {"health_check_period_ms": 1000, "health_check_timeout_ms": 2000, "health_check_failure_threshold": 4}
STEPS, BATCH = 40, 36


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Two nodes with room for a worker of two CPUs each."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with without_services():
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "_system_config": HEALTH})
        made.add_node(num_cpus=2)
        yield made
        made.shutdown()


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("kind", "alone", "write"), [("texts", "stream", write_texts), ("images", "pixels", write_images)]
)
def test_a_node_of_data_and_the_driver_are_lost_and_the_losses_are_those_of_a_plain_loop(
    s3: S3Server,  # noqa: F811
    cluster: Cluster,
    launch: Callable[..., Any],
    tmp_path: Path,
    kind: str,
    alone: str,
    write: Callable[[Path], None],
) -> None:
    """Tasks tokenize texts, or decode images, of which no node has a copy; one of those that tokenize dies."""
    expected = plain_losses(RowJob(kind=alone), batch=BATCH, steps=STEPS)
    write(tmp_path / "rows")
    store = S3FileSystem(endpoint_override=s3.environment["AWS_ENDPOINT_URL"])
    copy_files(str(tmp_path / "rows"), f"{BUCKET}/rows", LocalFileSystem(), store)
    only_data = cluster.add_node(num_cpus=1)
    words = (
        f"cluster.address={cluster.address}", "cluster.cpus_per_worker=2", "strategy=ddp", "strategy.num_workers=2",
        "job._target_=helpers.jobs.row_jobs.RowJob", f"job.kind={kind}", f"job.folder=s3://{BUCKET}/rows",
        f"job.mark={tmp_path / 'died'}", "job.pause_ms=300", f"train.steps={STEPS}", f"train.global_batch_size={BATCH}",
        "train.log_every=1", "train.eval_every=0", "checkpoint.every=5", "tracking=none", "data.batches_ahead=2",
    )  # fmt: skip
    first = launch(*words, RAY_AUTH_MODE="disabled")
    run_dir = wait_for_step(tmp_path, 4)
    cluster.remove_node(only_data, allow_graceful=False)
    cluster.add_node(num_cpus=1)
    wait_for_step(tmp_path, 22)
    everyone = [psutil.Process(first.pid), *psutil.Process(first.pid).children(recursive=True)]
    for process in everyone:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
    first.communicate(timeout=60)
    second = launch(*words, f"resume={run_dir}", RAY_AUTH_MODE="disabled")
    output, _ = second.communicate(timeout=400)
    assert second.returncode == 0, output
    assert losses(run_dir) == pytest.approx(expected, rel=1e-4)
    assert (tmp_path / "died").exists() == (kind == "texts")
    assert events(run_dir, "worker_lost") == [], "the workers go on"


@pytest.mark.campaign
@pytest.mark.parametrize(("read", "readers"), [("node", 2), ("run", 1)])
def test_a_stream_is_read_once_by_each_node(
    cluster: Cluster, launch: Callable[..., Any], tmp_path: Path, read: str, readers: int
) -> None:
    (marks := tmp_path / "marks").mkdir()
    words = (
        f"cluster.address={cluster.address}", "cluster.cpus_per_worker=1", "strategy=ddp", "strategy.num_workers=4",
        "job._target_=helpers.jobs.row_jobs.RowJob", "job.kind=told", f"job.mark={marks}", f"data.read={read}",
        f"train.steps={STEPS}", f"train.global_batch_size={BATCH}", "train.log_every=1", "train.eval_every=0",
        "tracking=none",
    )  # fmt: skip
    process = launch(*words, RAY_AUTH_MODE="disabled")
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output
    (run_dir,) = (file.parent for file in tmp_path.glob("outputs/*/*/run.json"))
    assert losses(run_dir) == pytest.approx(plain_losses(RowJob(), batch=BATCH, steps=STEPS), rel=1e-4)
    assert len(list(marks.iterdir())) == readers


@pytest.mark.campaign
def test_a_run_that_makes_room_in_the_queue_reads_on_at_the_next_row(
    cluster: Cluster, launch: Callable[..., Any], tmp_path: Path
) -> None:
    write_files(tmp_path / "rows")
    words = (
        f"cluster.address={cluster.address}", "strategy=ddp", "strategy.num_workers=2", "tracking=none",
        "job._target_=helpers.jobs.row_jobs.RowJob", f"train.global_batch_size={BATCH}", "train.log_every=1",
        "train.eval_every=0", "checkpoint.every=0",
    )  # fmt: skip
    first = launch(*words, "name=first", "job.kind=rows", f"job.folder={tmp_path / 'rows'}", "job.pause_ms=1000",
                   f"job.until={tmp_path / 'until'}", f"train.steps={STEPS}", RAY_AUTH_MODE="disabled")  # fmt: skip
    run_dir = wait_for_step(tmp_path, 4)
    urgent = launch(*words, "name=urgent", "job.kind=stream", "cluster.cpus_per_worker=2", "cluster.priority=1",
                    "train.steps=5", f"output_dir={tmp_path / 'urgent'}", RAY_AUTH_MODE="disabled")  # fmt: skip
    wait_for(lambda: events(run_dir, "yielded"), "the pause", timeout_s=100)
    (tmp_path / "until").touch()
    for process in (urgent, first):
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output
    (yielded,) = events(run_dir, "yielded")
    assert yielded["to"] == "urgent"
    assert 4 <= yielded["step"] < STEPS
    assert losses(run_dir) == pytest.approx(plain_losses(RowJob(), batch=BATCH, steps=STEPS), rel=1e-4)

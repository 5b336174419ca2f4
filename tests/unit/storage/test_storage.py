"""A directory on a store: reading and writing it, its lock, and the thread that copies files there."""

import os
import shutil
import threading
import time
from pathlib import Path

import pytest

from helpers.files.golden import Golden
from helpers.records.runs import wait_for
from helpers.servers.object_store import OUTPUT, s3  # noqa: F401 - s3 is a fixture
from orchestrator.storage.mirror import Mirror, make_private, staging_path
from orchestrator.storage.remote import ABANDONED_S, Remote, StorageError, is_url, store_locked


@pytest.fixture
def remote(tmp_path: Path) -> Remote:
    return Remote(f"file://{tmp_path}/store", timeout_s=5)


def test_what_is_a_url() -> None:
    assert is_url("s3://bucket/runs")
    assert is_url("file:///runs")
    assert not any(map(is_url, ("outputs", "/runs", "C:\\runs", "./s3://x")))


def test_names_may_have_any_characters(remote: Remote, tmp_path: Path) -> None:
    run = remote.child("2026-01-01").child("10-00-00-a run #1?")
    run.write("run.json", b"{}")
    assert (tmp_path / "store" / "2026-01-01" / "10-00-00-a run #1?" / "run.json").read_bytes() == b"{}"
    assert Remote(run.url, timeout_s=5).read("run.json") == b"{}"
    above, name = Remote(run.url, timeout_s=5).split(2)
    assert (above, name) == (remote, "2026-01-01/10-00-00-a run #1?")


def test_a_query_stays_at_the_end_of_a_url() -> None:
    run = Remote("s3://bucket/runs?region=x&scheme=http", timeout_s=5).child("a/b")
    assert run.url == "s3://bucket/runs/a/b?region=x&scheme=http"
    assert run.split(2) == (Remote("s3://bucket/runs?region=x&scheme=http", timeout_s=5), "a/b")


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["s3", "file"])
def test_files_come_and_go(scheme: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """On a server of each scheme that the documentation names."""
    if scheme == "s3":
        request.getfixturevalue("s3")
    remote = Remote(OUTPUT if scheme == "s3" else f"file://{tmp_path}/store", timeout_s=5)
    source = tmp_path / "source"
    source.write_bytes(os.urandom(20 << 20))
    parts: list[None] = []
    remote.put(source, "a/b/large", on_progress=lambda: parts.append(None))
    assert len(parts) == 3
    remote.write("a/small", b"old")
    remote.write("a/small", b"new")
    assert remote.read("a/small") == b"new"
    assert (remote.read("a/small", last_bytes=2), remote.read("a/small", last_bytes=9)) == (b"ew", b"new")
    assert sorted((e.name, e.is_file) for e in remote.list("a")) == [("b", False), ("small", True)]
    assert sorted(e.name for e in remote.list(recursive=True) if e.is_file) == ["a/b/large", "a/small"]
    remote.fetch("a/b/large", tmp_path / "x" / "y")
    assert (tmp_path / "x" / "y").read_bytes() == source.read_bytes()
    assert [p.name for p in (tmp_path / "x").iterdir()] == ["y"]
    remote.delete("a/small")
    remote.delete("a/small")
    remote.delete_directory("a")
    remote.delete_directory("a")
    assert not [e for e in remote.list(recursive=True) if e.is_file]
    for read in (lambda: remote.read("a/small"), lambda: remote.fetch("a/small", tmp_path / "z")):
        with pytest.raises(FileNotFoundError):
            read()
    assert not (tmp_path / "z").exists()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("sftp://host/runs", "sftp:// is not supported; use s3://.*or mount it on every node"),
        ("gs://bucket/runs", "gs:// is not supported; use s3://"),
        ("s3://bucket/runs?nosuch=1", "nosuch.*parameters are arguments of pyarrow.fs.S3FileSystem"),
        ("file:///proc/nowhere/runs", "cannot write x"),
        ("s3://bucket/runs?endpoint_override=127.0.0.1:9&scheme=http", "cannot write x.*check the endpoint"),
    ],
)
def test_a_store_that_cannot_be_used_is_named_with_a_remedy(
    url: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nobody")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    with pytest.raises(StorageError, match=f"^output_dir={url.replace('?', '[?]')}.*{message}"):
        Remote(url, timeout_s=5).write("x", b"")


def test_an_operation_without_progress_ends(tmp_path: Path, golden: Golden) -> None:
    os.mkfifo(tmp_path / "fifo")  # opening it for reading waits for a writer
    remote = Remote(f"file://{tmp_path}", timeout_s=0.3)
    with golden.raises(StorageError):
        remote.read("fifo")
    os.close(os.open(tmp_path / "fifo", os.O_RDWR | os.O_NONBLOCK))


@pytest.mark.slow
def test_the_lock_is_held_by_one_at_a_time(remote: Remote) -> None:
    inside: list[int] = []
    most: list[int] = []

    def work(number: int) -> None:
        with store_locked(remote):
            inside.append(number)
            most.append(len(inside))
            time.sleep(0.02)
            inside.remove(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert most == [1, 1, 1, 1]
    assert not [e for e in remote.list(".claims") if e.is_file]


def test_the_claim_of_a_dead_process_is_removed_after_a_while(remote: Remote, tmp_path: Path) -> None:
    remote.write(".claims/00", b"claim")
    with pytest.raises(TimeoutError, match="claimed"), store_locked(remote, timeout_s=0.3):
        pass
    long_ago = time.time() - ABANDONED_S - 1
    os.utime(tmp_path / "store" / ".claims" / "00", (long_ago, long_ago))
    with store_locked(remote, timeout_s=0.3):
        pass
    assert not [e for e in remote.list(".claims") if e.is_file]


def mask(source: Path, target: Path) -> bool:
    target.write_text(source.read_text().replace("secret", "****"))
    return True


def test_what_changes_is_copied_and_nothing_else(remote: Remote, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for name in ("run.json", "logs/rank-0.log", "samples/a.png", ".reserve", "checkpoints/step-1/x", "lease", ".s/x"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text("a secret")
    mirror = Mirror(run, remote, every_s=0.05, masked=mask)
    store = tmp_path / "store"
    wait_for(lambda: (store / "samples" / "a.png").exists())
    (run / "run.json").write_text("changed")
    wait_for(lambda: (store / "run.json").read_text() == "changed")
    (run / "metrics.jsonl").write_text("at the end")
    assert mirror.finish(5) == []
    copied = {str(p.relative_to(store)): p.read_text() for p in store.rglob("*") if p.is_file()}
    assert copied == {
        "run.json": "changed",
        "metrics.jsonl": "at the end",
        "samples/a.png": "a secret",
        "logs/rank-0.log": "a ****",
    }


@pytest.mark.slow
def test_a_store_that_is_away_is_tried_again_and_what_is_missing_is_named(tmp_path: Path) -> None:
    run, store = tmp_path / "run", tmp_path / "store"
    run.mkdir()
    (run / "run.json").write_text("{}")
    store.write_text("not a directory")
    mirror = Mirror(run, Remote(f"file://{store}", timeout_s=5), every_s=0.05, masked=mask)
    wait_for(mirror.problem)
    store.unlink()
    wait_for(lambda: (store / "run.json").exists())
    wait_for(lambda: mirror.problem() is None)
    shutil.rmtree(store)
    store.write_text("not a directory")
    (run / "report.md").write_text("late")
    wait_for(mirror.problem)
    assert mirror.finish(0.5) == ["report.md"]
    assert "cannot write report.md" in str(mirror.problem())


def test_a_process_that_has_lost_its_lease_copies_nothing(remote: Remote, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    mirror = Mirror(tmp_path / "run", remote, every_s=0.05, masked=mask, admitted=lambda: False)
    assert mirror.finish(5) == ["run.json"]
    assert not remote.list()


def test_the_staging_directory_is_private_and_differs_between_urls(tmp_path: Path) -> None:
    one, other = (staging_path(url, str(tmp_path / "staging")) for url in ("s3://b/runs", "s3://b/runs?region=x"))
    assert one != other
    assert one.parent == tmp_path / "staging"
    make_private(one)
    make_private(one)
    assert one.stat().st_mode & 0o777 == 0o700
    for directory in (one, one.parent) if os.getuid() == 0 else ():
        os.chown(directory, 12345, -1)
        with pytest.raises(PermissionError, match=r"belongs to another user; set storage\.staging_dir"):
            make_private(one)
        os.chown(directory, 0, -1)

"""The checkpoints of a script on a store, with two nodes that have directories of their own."""

import os
from pathlib import Path

import pytest

from helpers.servers.object_store import OUTPUT, s3  # noqa: F401 - s3 is a fixture
from orchestrator.features.scripts.stored_checkpoints import StoredCheckpoints
from orchestrator.records.run_dir import RunDir
from orchestrator.storage.remote import Remote

pytestmark = pytest.mark.timeout(60)


class Node:
    """The directory of a run on one node."""

    def __init__(self, path: Path, url: str):
        run_dir = RunDir(path, Remote(url, timeout_s=30))
        self.files = run_dir.script_checkpoints
        self.files.mkdir(parents=True)
        self.stored = StoredCheckpoints(run_dir, timeout_s=5)

    def write(self, name: str, text: str, *, at: int = 1) -> None:
        """Write a file that was changed ``at`` this time, in seconds."""
        path = self.files / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        os.utime(path, (at, at))

    def fetched(self) -> dict[str, str]:
        """All files, after those of the store have been brought."""
        self.stored.fetch(lambda: None)
        return {str(p.relative_to(self.files)): p.read_text() for p in self.files.rglob("*") if p.is_file()}


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store/run"


def check_two_nodes(tmp_path: Path, url: str) -> None:
    here, there = Node(tmp_path / "here", url), Node(tmp_path / "there", url)
    here.write("step-1/.metadata", "hidden")
    here.write("step-1/logs/rank-0.pt", "zero")
    here.stored.upload()
    assert there.fetched() == {"step-1/.metadata": "hidden", "step-1/logs/rank-0.pt": "zero"}


def test_another_node_has_what_was_uploaded(tmp_path: Path, url: str) -> None:
    check_two_nodes(tmp_path, url)


@pytest.mark.slow
@pytest.mark.usefixtures("s3")
def test_another_node_has_what_was_uploaded_to_an_object_store(tmp_path: Path) -> None:
    check_two_nodes(tmp_path, f"{OUTPUT}/run")


def test_the_newer_file_stays_and_a_removed_one_does_not_come_back(tmp_path: Path, url: str) -> None:
    here, there = Node(tmp_path / "here", url), Node(tmp_path / "there", url)
    for name in ("both", "mine", "removed"):
        here.write(name, "first")
    here.stored.upload()
    there.fetched()
    there.write("both", "second", at=2)
    there.write("mine", "of another node", at=2)
    there.stored.upload()
    here.write("mine", "not uploaded", at=3)
    (here.files / "removed").unlink()
    assert here.fetched() == {"both": "second", "mine": "not uploaded"}
    here.stored.upload()
    assert there.fetched() == {"both": "second", "mine": "not uploaded", "removed": "first"}


def test_what_is_equal_is_not_copied_again(tmp_path: Path, url: str) -> None:
    here = Node(tmp_path / "here", url)
    here.write("step-1", "text")
    here.stored.upload()
    stored = tmp_path / "store" / "run" / "script-checkpoints" / "step-1"
    before = stored.stat().st_mtime_ns
    inode = (here.files / "step-1").stat().st_ino
    here.stored.upload()
    here.fetched()
    assert (stored.stat().st_mtime_ns, (here.files / "step-1").stat().st_ino) == (before, inode)


def test_a_file_comes_after_those_written_before_it(tmp_path: Path, url: str) -> None:
    here = Node(tmp_path / "here", url)
    here.write("latest", "step-1", at=2)
    here.write("step-1", "text", at=1)
    here.stored.upload()
    stored = tmp_path / "store" / "run" / "script-checkpoints"
    assert (stored / "step-1").stat().st_mtime_ns < (stored / "latest").stat().st_mtime_ns

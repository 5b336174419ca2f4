"""Directories are listed while other processes remove what is in them."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from orchestrator.records import run_dir as run_dirs
from orchestrator.records.run_dir import files_below

LISTED_FOR_S = 0.5


@contextmanager
def short_lived_folders(parent: Path) -> Iterator[None]:
    """Create and remove folders with a file, as fast as a thread can."""
    over = threading.Event()

    def work() -> None:
        while not over.is_set():
            folder = parent / ".probe"
            folder.mkdir()
            (folder / "file").touch()
            (folder / "file").unlink()
            folder.rmdir()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_runs_are_found_while_folders_beside_them_vanish(tmp_path: Path) -> None:
    run = run_dirs.create(tmp_path, "digits-ddp")
    run.record_file.write_text("{}")
    with short_lived_folders(tmp_path), short_lived_folders(run.path.parent):
        until = time.monotonic() + LISTED_FOR_S
        while time.monotonic() < until:
            assert [found.path for found in run_dirs.all_runs(tmp_path)] == [run.path]


def test_files_are_found_while_folders_beside_them_vanish(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    log = tmp_path / "logs" / "rank-0.log"
    log.touch()
    with short_lived_folders(tmp_path):
        until = time.monotonic() + LISTED_FOR_S
        while time.monotonic() < until:
            assert [path for path in files_below(tmp_path) if path.name != "file"] == [log]


def test_a_folder_that_is_missing_has_nothing(tmp_path: Path) -> None:
    assert list(files_below(tmp_path / "missing")) == []
    assert list(run_dirs.all_runs(tmp_path / "missing")) == []

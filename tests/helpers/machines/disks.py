"""File systems that are full, or that stand still."""

import contextlib
import fcntl
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

_FREEZE, _THAW = 0xC0045877, 0xC0045878
"""FIFREEZE and FITHAW of <linux/fs.h>."""


def require_mounts() -> None:
    """Skip the test unless it may mount file systems; for tests that mount them in a thread."""
    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")


@contextlib.contextmanager
def mounted(folder: Path, *words: str | Path) -> Iterator[None]:
    """``mount <words> <folder>`` during the block; skips the test without the right to it."""
    require_mounts()
    if subprocess.run(["mount", *words, folder], stderr=subprocess.DEVNULL, check=False).returncode:
        pytest.skip("this machine does not mount file systems")
    try:
        yield
    finally:
        deadline = time.monotonic() + 20  # until killed workers have closed their files
        while subprocess.run(["umount", folder], stderr=subprocess.DEVNULL, check=False).returncode:
            if time.monotonic() > deadline:
                subprocess.run(["umount", "--lazy", folder], check=False)
                raise AssertionError(f"something still uses {folder}")
            time.sleep(0.2)


@dataclass
class FreezableDisk:
    """A disk mounted on ``folder``. While it is frozen, every write to it waits."""

    folder: Path
    frozen: bool = False

    def freeze(self) -> None:
        self._control(_FREEZE)
        self.frozen = True

    def thaw(self) -> None:
        self._control(_THAW)
        self.frozen = False

    def _control(self, request: int) -> None:
        file = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.ioctl(file, request, 0)
        finally:
            os.close(file)


@contextlib.contextmanager
def freezable_disk(parent: Path, *, megabytes: int, folder: Path | None = None) -> Iterator[FreezableDisk]:
    """An ext4 file system in a file in ``parent``, mounted on ``folder`` (default: a new one in ``parent``)."""
    image, folder = parent / "disk.img", folder or parent / "disk"
    folder.mkdir(exist_ok=True)
    with image.open("wb") as file:
        file.truncate(megabytes << 20)
    make = shutil.which("mkfs.ext4", path=f"{os.environ['PATH']}:/sbin:/usr/sbin")
    if make is None or subprocess.run([make, "-q", "-m", "0", image], stderr=subprocess.DEVNULL).returncode:
        pytest.skip("no mkfs.ext4")
    with mounted(folder, "-o", "loop", image):
        (folder / "lost+found").rmdir()
        disk = FreezableDisk(folder)
        try:
            yield disk
        finally:
            if disk.frozen:
                disk.thaw()

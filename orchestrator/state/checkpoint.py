"""Checkpoints on disk: safetensors files and a JSON manifest with their hashes. Nothing is ever unpickled.

``<root>/step-00000040/`` holds ``model.safetensors``, which the safetensors library can load, ``optimizer.safetensors``
and ``manifest.json``. A checkpoint is written to a hidden directory beside it, which is renamed when it is complete.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import hashlib
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import psutil

from orchestrator.state import tensor_file
from orchestrator.state.fence import Fence, FencedError
from orchestrator.state.train_state import TrainState

FORMAT = 1
MANIFEST = "manifest.json"
FILES = ("model.safetensors", "optimizer.safetensors")
HASH = "sha256"  # twice as fast as blake2b on CPUs with SHA instructions
_FOREIGN_STALE_S = 3600.0
STEP = re.compile(r"step-(\d{8,})")
_TEMPORARY = re.compile(r"\.step-\d{8,}\.(?P<host>.*)\.(?P<pid>\d+)")

T = TypeVar("T")


class CheckpointError(ValueError):
    """The checkpoint at ``path``, a local one or a URL, cannot be used. ``reason`` names the file and the problem."""

    def __init__(self, path: Path | str, reason: str):
        super().__init__(path, reason)
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"checkpoint {self.path}: {self.reason}"


def save(
    root: Path,
    state: TrainState,
    *,
    run_uid: str,
    fence: Fence | None = None,
    on_progress: Callable[[], None] = lambda: None,
) -> Path:
    """Write ``state`` below ``root`` and return the checkpoint's directory.

    Replaces a checkpoint of the same step. Returns when the data is on the disk. Readers see either the complete
    checkpoint or none, even after a crash at any moment.

    Args:
        root: the directory that holds the checkpoints; created if missing.
        state: the snapshot to write.
        run_uid: the identity of the run, recorded in the manifest.
        fence: consulted after the files are written, just before the rename. None if this process may always save.
        on_progress: called whenever some of the bytes have been written.

    Raises:
        OSError: the checkpoint could not be written. The incomplete files have been removed.
        FencedError: this process may no longer save. The files have been removed.
    """
    final = path_of(root, state.step)
    temporary = root / f".{final.name}.{socket.gethostname()}.{os.getpid()}"
    root.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir()
        files = {}
        for name, tensors in zip(FILES, (state.model, state.optimizer), strict=True):
            digest, size = tensor_file.write(temporary / name, tensors, on_progress=on_progress)
            files[name] = {HASH: digest, "bytes": size}
        position = {"step": state.step, "samples_consumed": state.samples_consumed}
        manifest = {
            "format": FORMAT,
            **position,
            "run_uid": run_uid,
            "meta": {k: v for k, v in state.meta.items() if k not in position},
            "files": files,
        }
        with (temporary / MANIFEST).open("w") as f:
            json.dump({**manifest, HASH: _digest(manifest)}, f, indent=1)
            f.flush()
            os.fsync(f.fileno())
        _sync_directory(temporary)
        if fence is not None and not fence.may_save():
            raise FencedError("a later generation of the run has replaced this worker and saves instead of it")
        _rename_into_place(temporary, final)
        _sync_directory(root)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return final


def load(path: Path) -> TrainState:
    """Verify the checkpoint in directory ``path`` and return its state, whose tensors are read one by one when used.

    Raises:
        CheckpointError: the directory is damaged or not a checkpoint.
    """
    manifest = read_manifest(path)
    with ThreadPoolExecutor(len(FILES)) as pool:  # reading and hashing release the GIL
        read = functools.partial(_checked, tensor_file.read, path, manifest)
        model, optimizer = pool.map(read, FILES)
    position = {"step": manifest["step"], "samples_consumed": manifest["samples_consumed"]}
    return TrainState(model=model, optimizer=optimizer, meta={**manifest["meta"], **position})


def verify(path: Path) -> None:
    """Read the checkpoint in directory ``path`` and compare its hashes, without keeping its tensors.

    Raises:
        CheckpointError: the directory is damaged or not a checkpoint.
    """
    manifest = read_manifest(path)
    for name in FILES:
        _checked(tensor_file.verify, path, manifest, name)


def read_manifest(path: Path) -> dict[str, Any]:
    """Read and verify the manifest of the checkpoint in directory ``path``.

    Raises:
        CheckpointError: the manifest is missing, damaged, or of a format that this version cannot read.
    """
    try:
        text = (path / MANIFEST).read_bytes()
    except FileNotFoundError:
        what = f"missing file {MANIFEST}" if path.is_dir() else "no such directory"
        raise CheckpointError(path, what) from None
    except OSError as e:
        raise CheckpointError(path, f"{MANIFEST} is unreadable: {e}") from e
    return parse_manifest(text, path)


def parse_manifest(text: bytes, path: Path | str) -> dict[str, Any]:
    """Verify the text of the manifest of the checkpoint at ``path``, a directory or a URL, and return its contents.

    Raises:
        CheckpointError: the manifest is damaged, or of a format that this version cannot read.
    """
    try:
        manifest = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise CheckpointError(path, f"{MANIFEST} is unreadable: {e}") from e
    if not isinstance(manifest, dict) or "format" not in manifest:
        raise CheckpointError(path, f"{MANIFEST} is unreadable: it is not a manifest")
    if manifest["format"] != FORMAT:
        raise CheckpointError(path, f"its format is {manifest['format']!r}, this version reads {FORMAT}")
    if manifest.pop(HASH, None) != _digest(manifest):
        raise CheckpointError(path, f"{MANIFEST} changed: its own {HASH} differs")
    if not _is_complete(manifest):
        raise CheckpointError(path, f"{MANIFEST} is unreadable: it lacks the position, the meta data or the files")
    return manifest


def path_of(root: Path, step: int) -> Path:
    """Return the directory of the checkpoint of ``step`` in ``root``, which may not exist."""
    return root / f"step-{step:08d}"


def step_of(name: str) -> int:
    """Return the step of the checkpoint in a directory of this name."""
    return int(name.removeprefix("step-"))


def list_checkpoints(root: Path) -> list[Path]:
    """Return the checkpoint directories in ``root``, oldest first, including damaged ones."""
    if not root.is_dir():
        return []
    return sorted((p for p in root.iterdir() if STEP.fullmatch(p.name)), key=lambda p: step_of(p.name))


def find_newest(root: Path, on_damaged: Callable[[CheckpointError], None]) -> Path | None:
    """Return the newest intact checkpoint in ``root``, or None.

    Calls ``on_damaged`` for each newer checkpoint that is damaged.
    """
    for path in reversed(list_checkpoints(root)):
        try:
            verify(path)
        except CheckpointError as e:
            on_damaged(e)
        else:
            return path
    return None


def prune(root: Path, keep: int, *, saved_step: int) -> None:
    """Remove all but the newest ``keep`` checkpoints, and the temporary directories of dead writers.

    Checkpoints of steps after ``saved_step``, which was saved just now, are removed too: the run has gone back to an
    older one, because they are damaged, and repeats these steps.
    """
    assert keep >= 1
    found = list_checkpoints(root)
    kept = [path for path in found if step_of(path.name) <= saved_step][-keep:]
    for path in set(found) - set(kept):
        # Hide the directory first, so that no reader finds half of it.
        hidden = root / f".{path.name}.{socket.gethostname()}.{os.getpid()}"
        with contextlib.suppress(OSError):
            path.rename(hidden)
            shutil.rmtree(hidden, ignore_errors=True)
    for path in root.glob(".step-*"):
        if _is_stale(path):
            shutil.rmtree(path, ignore_errors=True)


def _is_complete(manifest: Mapping[str, Any]) -> bool:
    """Return whether a manifest has all keys, with values of their types."""
    files = manifest.get("files")
    return (
        all(isinstance(manifest.get(key), int) for key in ("step", "samples_consumed"))
        and isinstance(manifest.get("meta"), dict)
        and isinstance(files, dict)
        and all(map(_is_file_entry, files.values()))
    )


def _is_file_entry(entry: Any) -> bool:
    if not isinstance(entry, dict):
        return False
    size = entry.get("bytes")
    return isinstance(entry.get(HASH), str) and isinstance(size, int) and size >= 0


def _checked(read: Callable[[Path, str, int], T], path: Path, manifest: Mapping[str, Any], name: str) -> T:
    """Call ``read(file, digest, size)`` with the manifest's entry for the file ``name``."""
    entry = manifest["files"].get(name)
    if entry is None:
        raise CheckpointError(path, f"{MANIFEST} does not list {name}")
    try:
        return read(path / name, entry[HASH], entry["bytes"])
    except FileNotFoundError:
        raise CheckpointError(path, f"missing file {name}") from None
    except OSError as e:
        raise CheckpointError(path, f"{name} is unreadable: {e.strerror}") from e
    except ValueError as e:
        raise CheckpointError(path, f"{name} {e}") from e


def _is_stale(temporary: Path) -> bool:
    """Return whether the writer of this temporary directory is dead.

    A process on another host cannot be inspected; it counts as dead after an hour without a change.
    """
    match = _TEMPORARY.fullmatch(temporary.name)
    if match is None:
        return False
    try:
        changed = max(p.stat().st_mtime for p in (temporary, *temporary.iterdir()))
        if match["host"] != socket.gethostname():
            return time.time() - changed > _FOREIGN_STALE_S
        # A process that is younger than the directory has reused the writer's pid.
        return psutil.Process(int(match["pid"])).create_time() > changed + 1
    except psutil.NoSuchProcess:
        return True
    except (OSError, psutil.Error):
        return False


def _rename_into_place(temporary: Path, final: Path) -> None:
    """Rename ``temporary`` to ``final``; an existing ``final`` ends up at ``temporary``."""
    if not final.exists():
        temporary.rename(final)
        return
    try:
        _exchange(temporary, final)
    except OSError as e:
        if e.errno not in (errno.EINVAL, errno.ENOSYS):
            raise
        # This file system cannot exchange names, so for a moment no checkpoint has this name.
        old = final.with_name(f".{final.name}.replaced.{os.getpid()}")
        final.rename(old)
        try:
            temporary.rename(final)
        except OSError:
            old.rename(final)
            raise
        shutil.rmtree(old, ignore_errors=True)


def _exchange(one: Path, other: Path) -> None:
    """Swap two names atomically with Linux's ``renameat2``."""
    at_cwd, rename_exchange = -100, 2
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(at_cwd, os.fsencode(one), at_cwd, os.fsencode(other), rename_exchange) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(other))


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

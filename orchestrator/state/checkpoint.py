"""Checkpoints on disk: safetensors files and a JSON manifest with their digests. Nothing is ever unpickled.

``<root>/step-00000040/`` holds ``model.safetensors``, which the safetensors library can load, ``optimizer.safetensors``
and ``manifest.json``. A checkpoint is written to a hidden directory beside it, which is renamed when it is complete.
``docs/checkpoints.md`` describes the format.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from orchestrator.state import tensor_file
from orchestrator.state.best import BestSoFar, best_steps
from orchestrator.state.fence import Fence, check_fence
from orchestrator.state.manifest import (
    CHUNK_BYTES,
    KINDS,
    MANIFEST,
    CheckpointError,
    Digests,
    Kind,
    file_name,
    files_of,
    manifest_text,
    read_manifest,
)
from orchestrator.state.tensor_file import StoredTensors
from orchestrator.state.train_state import TrainState

_FOREIGN_STALE_S = 3600.0
STEP = re.compile(r"step-(\d{8,})")
_TEMPORARY = re.compile(r"\.step-\d{8,}\.(?P<host>.*)\.(?P<pid>\d+)(-\d+)?")
_NUMBERS = itertools.count()
_REMOVALS = 10


def save(
    root: Path,
    state: TrainState,
    *,
    run_uid: str,
    fence: Fence | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    on_progress: Callable[[], None] = lambda: None,
) -> Path:
    """Write ``state`` below ``root`` and return the checkpoint's directory.

    Replaces a checkpoint of the same step. Returns when the data is on the disk. Readers see either the complete
    checkpoint or none, even after a crash at any moment.

    Args:
        root: the directory that holds the checkpoints; created if missing.
        run_uid: the identity of the run, recorded in the manifest.
        fence: consulted after the files are written, just before the rename. None if this process may always save.
        chunk_bytes: the size of the parts of a file that a reader can verify by themselves.
        on_progress: called whenever some of the bytes have been written.

    Raises:
        OSError: the checkpoint could not be written. The incomplete files have been removed.
        FencedError: this process may no longer save. The files have been removed.
    """
    with staging(root, state.step) as directory:
        files = write_part(directory, state, chunk_bytes=chunk_bytes, on_progress=on_progress)
        return commit(directory, state.meta, files, run_uid=run_uid, fence=fence)


@contextlib.contextmanager
def staging(root: Path, step: int) -> Iterator[Path]:
    """Make a hidden directory for the files of the checkpoint of ``step``; remove what is left of it at the end."""
    directory = make_staging(root, step)
    try:
        yield directory
    finally:
        remove_staging(directory)


def make_staging(root: Path, step: int) -> Path:
    """Make a hidden directory in ``root`` for files of the checkpoint of ``step``."""
    # With a number, because a save of an earlier generation may still wait for its other writers.
    directory = root / f".{path_of(root, step).name}.{socket.gethostname()}.{os.getpid()}-{next(_NUMBERS)}"
    root.mkdir(parents=True, exist_ok=True)
    directory.mkdir()
    return directory


def remove_staging(directory: Path | None) -> None:
    """Remove a directory of :func:`make_staging`, if any, which may have become a checkpoint."""
    if directory is None:
        return
    # Another writer may add its next file meanwhile; it cannot once the directory is gone.
    for _ in range(_REMOVALS):
        shutil.rmtree(directory, ignore_errors=True)
        if not directory.exists():
            break


def write_part(
    directory: Path,
    state: TrainState,
    *,
    part: int = 0,
    parts: int = 1,
    chunk_bytes: int = CHUNK_BYTES,
    on_progress: Callable[[], None] = lambda: None,
) -> dict[str, Digests]:
    """Write the tensors of ``state`` to files in ``directory``, and return the digests of these by name.

    The data is on the disk then; :func:`commit` waits for the names of the files.

    Args:
        directory: an existing directory.
        state: the boxes of this writer.
        part: the number of this writer, from 0.
        chunk_bytes: the size of the parts of a file that a reader can verify by themselves.
        on_progress: called whenever some of the bytes have been written.

    Raises:
        OSError: the files cannot be written.
    """

    def write(kind: Kind) -> tuple[str, Digests]:
        name = file_name(kind, part, parts)
        tensors, boxes = getattr(state, kind), state.boxes.get(kind)
        return name, tensor_file.write(
            directory / name, tensors, boxes=boxes, chunk_bytes=chunk_bytes, on_progress=on_progress
        )

    with ThreadPoolExecutor(len(KINDS), "writing") as pool:  # so that neither file waits for the other's disk
        return dict(pool.map(write, KINDS))


def commit(
    directory: Path,
    meta: Mapping[str, Any],
    files: Mapping[str, Digests],
    *,
    run_uid: str,
    parts: int = 1,
    fence: Fence | None = None,
) -> Path:
    """Make a checkpoint of the files in a directory of :func:`staging`, and return its directory.

    Args:
        directory: has the files of all writers.
        meta: of the state of the whole model.
        files: the digests of all files by name.
        run_uid: the identity of the run, recorded in the manifest.
        fence: consulted just before the rename. None if this process may always save.

    Raises:
        OSError: the manifest cannot be written.
        FencedError: this process may no longer save.
    """
    final = path_of(directory.parent, int(meta["step"]))
    write_manifest(directory, manifest_text(meta, run_uid=run_uid, files=files, parts=parts))
    check_fence(fence)
    _rename_into_place(directory, final)
    _sync_directory(directory.parent)
    return final


def write_manifest(directory: Path, text: str) -> None:
    """Write the manifest of a checkpoint through to the disk; readers of an earlier one see either of them."""
    temporary = directory / f".{MANIFEST}"
    with temporary.open("w") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    temporary.rename(directory / MANIFEST)
    _sync_directory(directory)


def load(path: Path) -> TrainState:
    """Return the state of the checkpoint in directory ``path``, whose tensors are read and verified when used.

    Raises:
        CheckpointError: the directory is damaged or not a checkpoint.
    """
    manifest = read_manifest(path)
    model, optimizer = (StoredTensors(path, files_of(manifest, kind)) for kind in KINDS)
    position = {"step": manifest["step"], "samples_consumed": manifest["samples_consumed"]}
    return TrainState(model=model, optimizer=optimizer, meta={**manifest["meta"], **position})


def verify(path: Path) -> None:
    """Read the checkpoint in directory ``path`` and compare its digests, without keeping its tensors.

    Raises:
        CheckpointError: the directory is damaged or not a checkpoint.
    """
    manifest = read_manifest(path)
    for kind in KINDS:
        StoredTensors(path, files_of(manifest, kind)).verify()


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


def hold(path: Path) -> Path:
    """Verify the checkpoint in directory ``path``, and return one that a run which trains does not remove.

    It has links to the files, until :func:`remove_staging` or the death of this process. Where none can be made, it is
    ``path``.

    Raises:
        CheckpointError: the directory is damaged, not a checkpoint, or was removed meanwhile.
    """
    held = None
    try:
        held = make_staging(path.parent, step_of(path.name))
        for file in path.iterdir():
            os.link(file, held / file.name)
        verify(held)
    except FileNotFoundError:
        remove_staging(held)
        raise CheckpointError(path, "no such directory") from None
    except CheckpointError as e:
        remove_staging(held)
        raise CheckpointError(path, e.reason) from e
    except OSError:  # of another user, say
        remove_staging(held)
        verify(path)
        return path
    return held


def is_held(path: Path) -> bool:
    """Return whether ``path`` is a directory that :func:`hold` has made, and not the checkpoint itself."""
    return STEP.fullmatch(path.name) is None


def complete_manifests(root: Path) -> dict[int, dict[str, Any]]:
    """Return the manifests of the checkpoints in ``root`` whose files have their sizes, by step. None is read."""
    found = {}
    for path in list_checkpoints(root):
        with contextlib.suppress(CheckpointError, OSError):
            manifest = read_manifest(path)
            if all((path / name).stat().st_size == digests.size for name, digests in files_of(manifest).items()):
                found[step_of(path.name)] = manifest
    return found


def superfluous(
    found: Collection[int], complete: Collection[int], keep: int, *, saved_step: int, best_steps: Collection[int]
) -> set[int]:
    """Return the steps of the checkpoints to remove: all but the newest ``keep`` complete ones, and incomplete ones.

    Those of ``best_steps`` are kept besides. Those of steps after ``saved_step``, which was saved just now, are removed
    too: the run has gone back to an older one, because they are damaged, and repeats these steps.

    Args:
        found: the steps of all checkpoints.
        complete: the steps of those that can be loaded.
        keep: at least 1.
        saved_step: the step that was saved just now.
        best_steps: of the best evaluations of which there are complete checkpoints.
    """
    assert keep >= 1
    newest = sorted(step for step in complete if step <= saved_step)[-keep:]
    oldest = newest[0] if len(newest) == keep else 0
    return {step for step in found if not oldest <= step <= saved_step and step not in best_steps}


def prune(root: Path, keep: int, *, saved_step: int, best: BestSoFar | None = None) -> None:
    """Remove the :func:`superfluous` checkpoints, and the temporary directories of dead writers.

    ``best``: the best evaluation so far. If there is no checkpoint of it, the best one that there is takes its place.
    The best by other metrics, which earlier parts of the run have followed, is kept too.
    """
    paths, manifests = {step_of(path.name): path for path in list_checkpoints(root)}, complete_manifests(root)
    bests = {step: BestSoFar.from_meta(found["meta"]) for step, found in manifests.items() if step <= saved_step}
    for step in superfluous(paths, manifests, keep, saved_step=saved_step, best_steps=best_steps(bests, best)):
        # Hide the directory first, so that no reader finds half of it.
        hidden = root / f".{paths[step].name}.{socket.gethostname()}.{os.getpid()}"
        with contextlib.suppress(OSError):
            paths[step].rename(hidden)
            shutil.rmtree(hidden, ignore_errors=True)
    remove_stale(root)


def remove_stale(root: Path) -> None:
    """Remove the temporary directories of dead writers."""
    for path in root.glob(".step-*"):
        if _is_stale(path):
            shutil.rmtree(path, ignore_errors=True)


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


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

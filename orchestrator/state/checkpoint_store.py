"""Checkpoints on a store: staged in a local directory, and complete there if and only if their manifest is there.

``<remote>/step-00000040/`` holds ``manifest.json`` and the files that it lists, each with the beginning of its hash in
its name: ``model.0123456789abcdef.safetensors``. Two writers of one step thus never replace files of each other, only
the manifest, which is written last.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from orchestrator.state.best import BestSoFar, best_steps
from orchestrator.state.checkpoint import (
    STEP,
    complete_manifests,
    hold,
    list_checkpoints,
    path_of,
    prune,
    step_of,
    superfluous,
    verify,
    write_manifest,
)
from orchestrator.state.fence import Fence, check_fence
from orchestrator.state.manifest import (
    MANIFEST,
    CheckpointError,
    Digests,
    Kind,
    amended,
    files_of,
    parse_manifest,
    read_manifest,
)
from orchestrator.state.optimizers import AVERAGE
from orchestrator.state.tensor_file import StoredTensors
from orchestrator.storage.remote import Remote

T = TypeVar("T")
_REPLACED = 4
"""How often a checkpoint may be replaced by a newer one while it is read."""


def _nothing() -> None:
    pass


class CheckpointStore:
    """The checkpoints of a run in the directory ``remote``, staged in ``root``.

    With ``remote`` None, the checkpoints are in ``root`` itself. Methods raise
    :class:`~orchestrator.storage.remote.StorageError` if the store cannot be used.
    """

    def __init__(self, root: Path, remote: Remote | None):
        self._root = root
        self._remote = remote

    def list(self) -> list[str]:
        """Return the names of the checkpoints, oldest first, including damaged ones."""
        if self._remote is None:
            return [path.name for path in list_checkpoints(self._root)]
        found = [entry.name for entry in self._remote.list() if STEP.fullmatch(entry.name)]
        return [name for name in sorted(found, key=step_of) if self._is_complete(self._remote, name)]

    def location(self, name: str) -> str:
        """Return where the user finds the checkpoint ``name``."""
        return str(self._root / name if self._remote is None else self._remote.child(name))

    def find_newest(self, on_damaged: Callable[[CheckpointError], None], *, held: bool = False) -> Path | None:
        """Return the newest intact checkpoint, which is here then, or None.

        Calls ``on_damaged`` for each newer checkpoint that is damaged. ``held``: see :meth:`hold`.
        """
        tried: set[str] = set()
        while names := [name for name in self.list() if name not in tried]:  # a run that trains may replace them
            tried.add(name := names[-1])
            try:
                if held or self._remote is not None:
                    return self.hold(name)
                verify(self._root / name)
            except CheckpointError as e:
                if name in self.list():
                    on_damaged(e)
            else:
                return self._root / name
        return None

    def hold(self, name: str) -> Path:
        """Return an intact checkpoint that stays while another process trains and prunes; see :func:`checkpoint.hold`.

        On a store, it is a copy here.

        Raises:
            CheckpointError: it is damaged or missing.
        """
        return hold(self._root / name) if self._remote is None else self.fetch(name)

    def choose(self, chosen: Callable[[Sequence[str]], str], use: Callable[[str], T]) -> T:
        """Return ``use(name)`` for the checkpoint that is ``chosen`` of the present ones.

        Another one is chosen if a run that trains has removed it meanwhile. Raises what the two functions raise.
        """
        for _ in range(_REPLACED):
            name = chosen(self.list())
            try:
                return use(name)
            except (CheckpointError, FileNotFoundError):
                if name in self.list():
                    raise
        return use(chosen(self.list()))

    def fetch(self, name: str, *, on_progress: Callable[[], None] = _nothing) -> Path:
        """Return the local directory of the checkpoint ``name``, copied from the store unless it is here already.

        Raises:
            CheckpointError: it is damaged or missing on the store.
        """
        path = self._root / name
        if self._remote is None:
            return path
        remote = self._remote.child(name)
        try:
            manifest = remote.read(MANIFEST)
            try:
                if (path / MANIFEST).read_bytes() == manifest:
                    verify(path)
                    return path
            except (OSError, CheckpointError):
                pass  # a copy that is missing or incomplete here
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir(parents=True)
            (path / MANIFEST).write_bytes(manifest)
            for file, digests in files_of(read_manifest(path)).items():
                remote.fetch(_stored_name(file, digests), path / file, on_progress=on_progress)
            verify(path)
        except FileNotFoundError as e:
            with contextlib.suppress(CheckpointError):  # the run has removed it there, since it was copied
                verify(path)
                return path
            raise CheckpointError(remote.url, f"missing file: {e}") from e
        except CheckpointError as e:
            raise CheckpointError(remote.url, e.reason) from e
        return path

    def read_manifest(self, name: str) -> dict[str, Any]:
        """Return the manifest of the checkpoint ``name``.

        Raises:
            CheckpointError: it is damaged or missing.
        """
        if self._remote is None:
            return read_manifest(self._root / name)
        remote = self._remote.child(name)
        try:
            return parse_manifest(remote.read(MANIFEST), remote.url)
        except FileNotFoundError as e:
            raise CheckpointError(remote.url, f"missing file: {e}") from e

    def model_size(self, name: str) -> int:
        """Return the size in bytes of the files of the model of the checkpoint ``name``.

        Raises:
            CheckpointError: the manifest is damaged or missing.
        """
        return sum(digests.size for digests in files_of(self.read_manifest(name), "model").values())

    def model(self, name: str, folder: Path, *more: Kind) -> StoredTensors:
        """Return the parameters and buffers in the checkpoint ``name``.

        Args:
            folder: an existing directory, to which the files are copied if they are on a store.
            more: what else is wanted beside the model.

        Raises:
            CheckpointError: the checkpoint is damaged or missing.
            OSError: a file cannot be copied.
        """
        files = files_of(self.read_manifest(name), "model", *more)
        if self._remote is None:
            return StoredTensors(self._root / name, files)
        remote = self._remote.child(name)
        for file, digests in files.items():
            remote.fetch(_stored_name(file, digests), folder / file)
        return StoredTensors(folder, files)

    def upload(self, name: str, *, fence: Fence | None, on_progress: Callable[[], None] = _nothing) -> None:
        """Copy the local checkpoint ``name`` to the store, where it replaces one of the same step.

        Raises:
            FencedError: this process may no longer save.
            CheckpointError: the checkpoint is damaged or missing here.
            OSError: it cannot be read, or the store cannot be used.
        """
        path = self._root / name
        self.upload_files(name, path, files_of(read_manifest(path)), on_progress=on_progress)
        self.commit(name, (path / MANIFEST).read_text(), fence=fence)

    def upload_files(
        self, name: str, directory: Path, files: Mapping[str, Digests], *, on_progress: Callable[[], None] = _nothing
    ) -> None:
        """Copy ``files`` of the checkpoint ``name``, which are in ``directory``, to the store.

        Raises:
            OSError: one cannot be read, or the store cannot be used.
        """
        assert self._remote is not None
        for file, digests in files.items():
            self._remote.put(directory / file, f"{name}/{_stored_name(file, digests)}", on_progress=on_progress)

    def commit(self, name: str, manifest: str, *, fence: Fence | None) -> None:
        """Make a checkpoint ``name`` of files that are on the store; it replaces one of the same step.

        Raises:
            FencedError: this process may no longer save.
            OSError: the store cannot be used.
        """
        assert self._remote is not None
        check_fence(fence)
        self._remote.child(name).write(MANIFEST, manifest.encode())

    def amend(self, name: str, meta: Mapping[str, Any], *, fence: Fence | None) -> None:
        """Replace entries of the metadata of the checkpoint ``name``.

        Raises:
            FencedError: this process may no longer save.
            CheckpointError: the checkpoint is damaged or missing.
            OSError: it cannot be written, or the store cannot be used.
        """
        text, path = amended(self.read_manifest(name), meta), self._root / name
        if self._remote is not None:
            self.commit(name, text, fence=fence)
        else:
            check_fence(fence)
        if (path / MANIFEST).exists():
            write_manifest(path, text)

    def prune(self, keep: int, *, saved_step: int, best: BestSoFar | None = None) -> None:
        """Remove what :func:`orchestrator.state.checkpoint.prune` removes."""
        if self._remote is None:
            prune(self._root, keep, saved_step=saved_step, best=best)
            return
        names = {step_of(entry.name): entry.name for entry in self._remote.list() if STEP.fullmatch(entry.name)}
        complete = [step for step, name in names.items() if self._is_complete(self._remote, name)]
        bests = {step: self._best_at(step) for step in complete if step <= saved_step}
        for step in superfluous(names, complete, keep, saved_step=saved_step, best_steps=best_steps(bests, best)):
            self._remote.delete(f"{names[step]}/{MANIFEST}")  # first, so that no reader finds half a checkpoint
            self._remote.delete_directory(names[step])

    def best(self) -> BestSoFar | None:
        """Return the best evaluation of which there is a checkpoint, or the one whose checkpoint is missing.

        None if no checkpoint says which is the best.
        """
        best = next(filter(None, map(self._best_at, sorted(self._complete(), reverse=True))), None)
        found = None if best is None else self.best_saved(best)
        return best if found is None or found.value is None else found

    def best_saved(self, best: BestSoFar) -> BestSoFar:
        """Return ``best``, the best evaluation so far, or the best of which there is a checkpoint; step 0 if none.

        Without a value, it is what an earlier part of the run has saved as the best of this metric.
        """
        return best.among(self._complete(), self._best_at)

    def _complete(self) -> Sequence[int]:
        """Return the steps of the complete checkpoints."""
        return list(complete_manifests(self._root)) if self._remote is None else list(map(step_of, self.list()))

    def _best_at(self, step: int) -> BestSoFar | None:
        """Return what the checkpoint of a step says of the best evaluation; None if it says nothing or is damaged."""
        try:
            return BestSoFar.from_meta(self.read_manifest(path_of(self._root, step).name)["meta"])
        except CheckpointError:
            return None

    @staticmethod
    def _is_complete(remote: Remote, name: str) -> bool:
        return any(entry.name == MANIFEST for entry in remote.list(name))


def _stored_name(file: str, digests: Digests) -> str:
    stem, _, suffix = file.partition(".")
    return f"{stem}.{digests.name}.{suffix}"


def exports_average(store: CheckpointStore, checkpoint: str) -> bool:
    """Return whether the model of a checkpoint has averaged weights: ``checkpoint.best`` is a metric of these."""
    best = BestSoFar.from_meta(store.read_manifest(checkpoint)["meta"])
    return best is not None and best.of_average


def exported_weights(store: CheckpointStore, checkpoint: str, folder: Path) -> Mapping[str, Tensor]:
    """Return the parameters and buffers of the model of a checkpoint, each read when it is asked for.

    Arguments and errors as of :meth:`CheckpointStore.model`.
    """
    if not exports_average(store, checkpoint):
        return store.model(checkpoint, folder)
    dtypes = {name: tensor.dtype for name, tensor in store.model(checkpoint, folder).outline().items()}
    tied = store.read_manifest(checkpoint)["meta"].get("tied", {})
    return _Averaged(store.model(checkpoint, folder, "optimizer"), dtypes, tied)


class _Averaged(Mapping[str, Tensor]):
    """The tensors of a model, with the averages of those that have one, in the dtypes of the model."""

    def __init__(self, stored: StoredTensors, dtypes: Mapping[str, torch.dtype], tied: Mapping[str, str]):
        self._stored, self._dtypes, self._tied = stored, dtypes, tied

    def __getitem__(self, name: str) -> Tensor:
        average = f"{self._tied.get(name, name)}/{AVERAGE}"
        if average not in self._stored:
            return self._stored[name]
        return self._stored[average].to(self._dtypes[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._dtypes)

    def __len__(self) -> int:
        return len(self._dtypes)

"""The tensors of a checkpoint, put together from the boxes in its files, each read when it is asked for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from orchestrator.planning.boxes import Box, first_overlap, has_hole
from orchestrator.state.digests import Digests
from orchestrator.state.manifest import CheckpointError
from orchestrator.state.tensor_file import Stored, TensorFile

_READERS = 4


class StoredTensors(MutableMapping[str, Tensor]):
    """Whole tensors by name. A change is not written to the files.

    Methods raise :class:`CheckpointError` if a file is missing or damaged.
    """

    def __init__(self, path: Path, files: dict[str, Digests]):
        """Read the headers of the ``files``, by name, of the checkpoint in directory ``path``.

        Raises:
            CheckpointError: a file is missing or damaged, or the boxes of a tensor overlap or leave a hole.
        """
        self._path = path
        self._files = {name: self._open(name, digests) for name, digests in files.items()}
        self._entries: dict[str, list[tuple[str, Stored]] | Tensor] = {}
        places: dict[str, list[tuple[str, Stored]]] = {}
        for file, opened in self._files.items():
            for name, stored in opened.stored.items():
                places.setdefault(name, []).append((file, stored))
        for name, found in places.items():
            self._check(name, found)
        self._entries.update(places)

    def read(self, name: str, box: Box) -> Tensor:
        """Read a part of a tensor, and nothing else of the files but what verifies it."""
        entry = self._entries[name]
        if isinstance(entry, Tensor):
            return entry[box.slices_in(Box.whole(entry.shape))]
        whole: Tensor | None = None
        for file, stored in entry:
            common = stored.box.overlap(box)
            if common is None:
                continue
            with _named(self._path, file):
                part = self._files[file].read(name, common)
            if common == box:
                return part
            whole = torch.empty(box.shape, dtype=part.dtype) if whole is None else whole
            whole[common.slices_in(box)] = part
        return torch.empty(box.shape, dtype=entry[0][1].dtype) if whole is None else whole

    def verify(self) -> None:
        """Read all files once and compare their digests, without keeping their tensors."""

        def verify(name: str) -> None:
            with _named(self._path, name):
                self._files[name].verify()

        with ThreadPoolExecutor(_READERS, "verifying") as pool:  # reading and hashing release the GIL
            list(pool.map(verify, self._files))

    def outline(self) -> dict[str, Tensor]:
        """Return tensors of the same shapes and dtypes on the meta device, without reading any."""
        return {name: self._outlined(entry) for name, entry in self._entries.items()}

    def __getitem__(self, name: str) -> Tensor:
        entry = self._entries[name]
        return entry if isinstance(entry, Tensor) else self.read(name, Box.whole(entry[0][1].box.full))

    def __setitem__(self, name: str, tensor: Tensor) -> None:
        self._entries[name] = tensor

    def __delitem__(self, name: str) -> None:
        del self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def _open(self, name: str, digests: Digests) -> TensorFile:
        with _named(self._path, name):
            return TensorFile(self._path / name, digests)

    def _check(self, name: str, places: list[tuple[str, Stored]]) -> None:
        """Raise an error unless the boxes of the tensor ``name`` are all of it, and each element is in one of them."""
        (first_file, first), *others = places
        for file, other in others:
            if (other.box.full, other.dtype) != (first.box.full, first.dtype):
                raise CheckpointError(
                    self._path,
                    f"{file} has a part of {name}, {other.dtype} of shape {list(other.box.full)}, which is "
                    f"{first.dtype} of shape {list(first.box.full)} in {first_file}",
                )
        boxes = [stored.box for _, stored in places]
        if (pair := first_overlap(boxes)) is not None:
            (one, a), (two, b) = (places[index] for index in pair)
            raise CheckpointError(self._path, f"{two} has {b.box} of {name}, which overlaps {a.box} in {one}")
        if has_hole(boxes):
            parts = ", ".join(f"{stored.box} in {file}" for file, stored in places[:4])
            raise CheckpointError(
                self._path, f"no file has all of {name}, of shape {list(first.box.full)}: there is only {parts}"
            )

    @staticmethod
    def _outlined(entry: list[tuple[str, Stored]] | Tensor) -> Tensor:
        if isinstance(entry, Tensor):
            return entry
        stored = entry[0][1]
        return torch.empty(stored.box.full, dtype=stored.dtype, device="meta")


@contextlib.contextmanager
def _named(path: Path, name: str) -> Iterator[None]:
    """Turn errors about the file ``name``, whose text is a predicate, into errors that name it."""
    try:
        yield
    except FileNotFoundError:
        raise CheckpointError(path, f"missing file {name}") from None
    except OSError as e:
        raise CheckpointError(path, f"{name} is unreadable: {e.strerror}") from e
    except ValueError as e:
        raise CheckpointError(path, f"{name} {e}") from e

"""Safetensors files of boxes, which are hashed while they are written or read.

The format is the header's length (8 bytes, little endian), a JSON header, and the data. Unlike the safetensors
library's own writer, this one releases the GIL while it writes large tensors, and copies none of them. The header's
``__metadata__`` has JSON by name: ``boxes`` says which tensors are shards of larger ones, as the shape of the whole
tensor and in each dimension the offset of the shard, or a list with the first place and the number of places of each of
its ranges; and ``dtypes`` which have a dtype that the format lacks. Those are stored as bytes: U8 with one more
dimension.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from orchestrator.compat.torch import as_bytes
from orchestrator.planning.placement import Box, box_problem, first_overlap, has_hole
from orchestrator.state.manifest import CHUNK_BYTES, CheckpointError, ChunkHasher, Digests, VerifiedFile

_BOXES = "boxes"
_OTHER_DTYPES = "dtypes"
_SYNC_BYTES = 64 << 20
"""Wait for the disk after this many bytes: a single wait at the end would hide whether a slow disk still writes."""
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def write(
    path: Path,
    tensors: Mapping[str, Tensor],
    *,
    boxes: Mapping[str, Box] | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    on_progress: Callable[[], None] = lambda: None,
) -> Digests:
    """Write contiguous host tensors through to the disk.

    Args:
        tensors: what to write, by name.
        boxes: the boxes of those that are shards of larger tensors.
        chunk_bytes: the size of the chunks of the digests.
        on_progress: called whenever some of the bytes have been written.

    Returns:
        The digests of the file.

    Raises:
        OSError: the file cannot be written; the disk may be full.
        ValueError: see :func:`header_text`.
    """
    text = header_text(tensors, boxes)
    head, data = [len(text).to_bytes(8, "little"), text], [t for _, t in _ordered(tensors)]
    size = 0
    with path.open("wb", buffering=1 << 20) as f, ThreadPoolExecutor(1, "hashing") as beside:
        digests = beside.submit(_hash, _chunks(head, data), chunk_bytes)  # both loops release the GIL
        for chunk in _chunks(head, data):
            before, size = size, size + f.write(chunk)
            on_progress()
            if before // _SYNC_BYTES < size // _SYNC_BYTES:
                f.flush()
                os.fdatasync(f.fileno())
                on_progress()
        f.flush()
        os.fsync(f.fileno())
    on_progress()
    return digests.result()


def header_text(tensors: Mapping[str, Tensor], boxes: Mapping[str, Box] | None = None) -> bytes:
    """Return the header of a file of ``tensors``, in any memory; see :func:`write`.

    Raises:
        ValueError: a tensor cannot be written; the text names it.
    """
    shards = {name: box for name, box in (boxes or {}).items() if not box.is_whole}
    parts = {name: [b.full, [r if len(r) > 1 else r[0][0] for r in b.ranges]] for name, b in shards.items()}
    others = {name: str(t.dtype).removeprefix("torch.") for name, t in tensors.items() if t.dtype not in _DTYPE_NAMES}
    notes = {key: json.dumps(value) for key, value in ((_BOXES, parts), (_OTHER_DTYPES, others)) if value}
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **notes}}
    position = 0
    for name, tensor in _ordered(tensors):
        if tensor.layout != torch.strided or tensor.is_quantized:
            kind = "quantized" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
            raise ValueError(f"{name} is a tensor of the kind {kind}, which cannot be saved; keep a plain tensor")
        other = [tensor.dtype.itemsize] if name in others else []
        header[name] = {
            "dtype": "U8" if other else _DTYPE_NAMES[tensor.dtype],
            "shape": [*tensor.shape, *other],
            "data_offsets": [position, position + tensor.nbytes],
        }
        position += tensor.nbytes
    text = json.dumps(header).encode()
    return text + b" " * (-len(text) % 8)


def _ordered(tensors: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    """Return the tensors in their order in a file: wide types first, so that each tensor is aligned."""
    return sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))


@dataclass(frozen=True)
class Stored:
    """A box in a file: its dtype, and the position of its first byte."""

    box: Box
    dtype: torch.dtype
    start: int


class TensorFile:
    """The boxes of a safetensors file.

    Attributes:
        stored: where each is, by the name of its tensor.
    """

    def __init__(self, path: Path, digests: Digests):
        """Read the header.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is damaged or not a safetensors file; the text is a predicate whose subject is the file's
                name.
        """
        self._file = VerifiedFile(path, digests)
        self.stored: dict[str, Stored] = {}
        size = digests.size
        length = bytearray(min(8, size))
        self._file.readinto(memoryview(length), 0)
        try:
            data_start = 8 + int.from_bytes(length, "little")
            if data_start > size:
                raise ValueError("its header ends after the file")
            text = bytearray(data_start - 8)
        except ValueError as e:
            raise ValueError(f"is not a safetensors file: {e}") from e
        self._file.readinto(memoryview(text), 8)
        try:
            header = json.loads(text)
            notes = header.pop("__metadata__", {})
            parts, others = (json.loads(notes.get(key, "{}")) for key in (_BOXES, _OTHER_DTYPES))
            for name, entry in header.items():
                self.stored[name] = _stored(name, entry, parts.get(name), others.get(name), data_start, size)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
            raise ValueError(f"is not a safetensors file: {e}") from e
        for name, found in self.stored.items():
            if (problem := box_problem(found.box)) is not None:
                raise ValueError(f"has no place for {name}: its box {problem}")

    def read(self, name: str, box: Box) -> Tensor:
        """Read a part of the stored box ``name``: the bytes of ``box``, and to verify them, the chunks around them.

        Raises:
            OSError: the file cannot be read.
            ValueError: the file is damaged; the text is a predicate whose subject is the file's name.
        """
        found = self.stored[name]
        tensor = torch.empty(box.shape, dtype=found.dtype)
        data, position, width = _bytes_of(tensor), 0, found.dtype.itemsize
        for first, length in box.runs_in(found.box):
            part = data[position : position + length * width]
            self._file.readinto(part, found.start + first * width)
            position += len(part)
        return tensor

    def verify(self) -> None:
        """Read the whole file once and compare its digests. Raises what :meth:`read` raises."""
        self._file.verify()


def _stored(name: str, entry: Mapping[str, Any], part: Any, other: Any, data_start: int, size: int) -> Stored:
    """Return where the tensor ``name`` is in a file of ``size`` bytes.

    Raises:
        ValueError, KeyError, TypeError: it cannot be there.
    """
    shape, (start, stop), dtype = tuple(entry["shape"]), entry["data_offsets"], _DTYPES[entry["dtype"]]
    if other is not None:
        shape, dtype = shape[:-1], getattr(torch, other)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{name} has the dtype {other!r}")
    full, offset = (shape, (0,) * len(shape)) if part is None else map(tuple, part)
    ranges = tuple(
        tuple((first, places) for first, places in begin) if isinstance(begin, list) and begin else ((begin, n),)
        for begin, n in zip(offset, shape, strict=True)
    )
    if not all(isinstance(n, int) and n >= 0 for n in (*shape, start, stop, *full)):
        raise ValueError(f"{name} has shape {shape} and offsets {start} and {stop}")
    if not all(isinstance(n, int) for of_axis in ranges for places in of_axis for n in places):
        raise ValueError(f"{name} begins at {offset} of its tensor")
    if (box := Box(full=full, ranges=ranges)).shape != shape:
        raise ValueError(f"{name} has shape {shape} at {box}")
    if math.prod(shape) * dtype.itemsize != stop - start:
        raise ValueError(f"{name} has {stop - start} bytes")
    if data_start + stop > size:
        raise ValueError(f"{name} ends after the file")
    return Stored(box, dtype, data_start + start)


def _hash(chunks: Iterable[memoryview], chunk_bytes: int) -> Digests:
    hasher = ChunkHasher(chunk_bytes)
    for chunk in chunks:
        hasher.update(chunk)
    return hasher.finish()


def _chunks(head: Sequence[bytes], tensors: Sequence[Tensor]) -> Iterator[memoryview]:
    yield from (memoryview(part) for part in head)
    for tensor in tensors:
        data = _bytes_of(tensor)
        for start in range(0, len(data), CHUNK_BYTES):
            yield data[start : start + CHUNK_BYTES]


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the tensor's memory, without a copy."""
    data: memoryview = as_bytes(tensor).numpy().data
    return data


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

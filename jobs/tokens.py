"""Tokens on disk, read where they lie: files of ``uint16`` or ``uint32``, and texts, whose tokens are their bytes."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

IGNORED = -100
"""The label of what the loss leaves out."""

BYTES = 256
"""The number of different tokens of a text."""

TOKEN_SUFFIXES = (".npy", ".bin")
"""The endings of the names of files of tokens; other files are texts."""

PROBED_NUMBERS = 2**16
"""The numbers at the beginning of a file that show if they are of another type."""
MANY, FEW = 16, 4
"""Tokens below ``FEW`` times 2**16 in uint32 are ``MANY`` different lower halves, and upper ones below ``FEW``."""

Tokens = npt.NDArray[np.unsignedinteger]


@dataclass(frozen=True, kw_only=True)
class Source:
    """The tokens of one file. Only a file that ``orchestrator tokenize`` has made has the facts that may be None.

    Attributes:
        name: how errors call the file.
        tokens: of shape (tokens,).
        vocabulary: the number of tokens that the tokenizer knows.
        largest: the largest token in the file.
        end_token: the token after each document.
    """

    name: str
    tokens: Tokens
    vocabulary: int | None = None
    largest: int | None = None
    end_token: int | None = None

    def split(self, percent: int) -> tuple[Source, Source]:
        """Return the source without its last ``percent``, and these."""
        kept = len(self.tokens) - len(self.tokens) * percent // 100
        return replace(self, tokens=self.tokens[:kept]), replace(self, tokens=self.tokens[kept:])


def open_source(path: Path, *, dtype: str) -> Source:
    """Map a file of tokens into memory: ``.npy``, ``.bin`` with ``dtype``, and anything else as a text.

    A file that has a description beside it, ``<file>.json``, is read with the dtype in that.

    Raises:
        OSError: the file cannot be read.
        ValueError: it does not hold whole tokens.
    """
    name, about = str(path), _description(path)
    if path.suffix == ".npy":
        try:
            tokens: Tokens = np.load(path, mmap_mode="r")
        except (ValueError, EOFError) as e:
            raise ValueError("is no whole .npy file: it is cut short, or damaged") from e
        if tokens.ndim != 1 or tokens.dtype.kind != "u":
            raise ValueError(f"holds {tokens.dtype} of shape {list(tokens.shape)}, not unsigned integers in a row")
    else:
        kind = np.dtype(about.get("dtype", dtype) if path.suffix == ".bin" else np.uint8)
        size = path.stat().st_size
        if size % kind.itemsize:
            raise ValueError(
                f"{size} bytes are no whole number of {kind} tokens: it is cut short, or of another job.dtype"
            )
        tokens = np.memmap(path, dtype=kind, mode="r") if size else np.empty(0, kind)
        if kind == np.uint16 and not about and _are_halves(tokens[:PROBED_NUMBERS]):
            raise ValueError("holds uint32 and not uint16 (job.dtype), because every second number is nearly 0")
    if len(tokens) != about.get("tokens", len(tokens)):
        raise ValueError(f"has {len(tokens)} tokens, but {about['tokens']} by {path}.json: it is cut short")
    known = {key: about.get(key) for key in ("vocabulary", "largest", "end_token")}
    return Source(name=name, tokens=tokens, **known)


def _are_halves(numbers: Tokens) -> bool:
    """Return whether numbers look like the lower and upper halves of tokens of twice their size, in turn."""
    lower, upper = numbers[::2], numbers[1::2]
    return len(np.unique(lower)) > MANY and int(upper.max(initial=0)) < FEW


def _description(path: Path) -> dict[str, Any]:
    """Return how ``orchestrator tokenize`` has described a file of tokens; empty for other files."""
    file = path.with_name(f"{path.name}.json")
    if path.suffix not in TOKEN_SUFFIXES or not file.exists():
        return {}
    try:
        about = json.loads(file.read_text())
        return {key: about[key] for key in ("dtype", "tokens", "vocabulary", "largest", "end_token")}
    except (ValueError, KeyError, TypeError) as e:
        raise ValueError(f"{file} is damaged ({type(e).__name__}: {e}); remove it, or make the tokens again") from e


def help_texts() -> Source:
    """Return the help texts that Python ships, sorted by name.

    Raises:
        ValueError: they are not installed.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as e:
        raise ValueError("job.path=null: pydoc_data.topics is not installed; set it to a text file") from e
    text = "".join(topics[name] for name in sorted(topics)).encode()
    return Source(name="null", tokens=np.frombuffer(text, np.uint8))


class SourceSamples(Dataset[tuple[Tensor, Tensor]]):
    """The samples of sources, one source after the other.

    Attributes:
        counts: how many samples each source has.
    """

    def __init__(self, sources: Sequence[Source], counts: Sequence[int]):
        self.sources, self.counts = sources, counts
        self.ends = list(accumulate(counts))

    def __len__(self) -> int:
        return self.ends[-1]

    def place(self, index: int) -> tuple[int, int]:
        """Return the number of the source of a sample, and the number of the sample in it.

        Raises:
            IndexError: there is no such sample.
        """
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = bisect_right(self.ends, index)
        return number, index - self.ends[number] + self.counts[number]


class Windows(SourceSamples):
    """Consecutive windows ``(input, target)`` of sources, both int64 of shape (context,).

    The target is the input shifted by one token. No window spans two sources.
    """

    def __init__(self, sources: Sequence[Source], *, context: int, vocabulary: int):
        super().__init__(sources, [max(0, (len(source.tokens) - 1) // context) for source in sources])
        self.context, self.vocabulary = context, vocabulary

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        number, window_number = self.place(index)
        source, start = self.sources[number], window_number * self.context
        window = source.tokens[start : start + self.context + 1].astype(np.int64)
        if (largest := int(window.max())) >= self.vocabulary:
            raise ValueError(
                f"{source.name}: holds token {largest} between {start} and {start + self.context}, but the model knows "
                f"only {self.vocabulary}; set job.vocabulary or job.dtype, or make the tokens with its tokenizer"
            )
        tokens = torch.from_numpy(window)
        return tokens[:-1], tokens[1:]


class Documents(SourceSamples):
    """The documents of sources, each padded: ``(input, target)``, both int64 of shape (context,).

    A document begins with the ``end_token`` of the one before it, and is cut after each ``context`` tokens. The target
    is the input shifted by one token, and ``IGNORED`` where the input is padding.
    """

    def __init__(self, sources: Sequence[Source], *, context: int, end_token: int):
        self._first = [_document_starts(source.tokens, end_token) for source in sources]
        parts = [-(-np.diff(first) // context) for first in self._first]
        super().__init__(sources, [int(each.sum()) for each in parts])
        self.context, self.end_token = context, end_token
        self._parts = [np.cumsum(each) for each in parts]

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        number, part = self.place(index)
        first, parts = self._first[number], self._parts[number]
        document = int(np.searchsorted(parts, part, side="right"))
        part -= int(parts[document - 1]) if document else 0
        start = int(first[document]) + part * self.context
        stop = min(start + self.context, int(first[document + 1]))
        tokens = self.sources[number].tokens[max(start, 0) : stop + 1].astype(np.int64)
        if start < 0:  # no document comes before the first one
            tokens = np.concatenate([[self.end_token], tokens])
        inputs = torch.full((self.context,), self.end_token)
        target = torch.full((self.context,), IGNORED)
        inputs[: stop - start] = torch.from_numpy(tokens[:-1])
        target[: stop - start] = torch.from_numpy(tokens[1:])
        return inputs, target


def _document_starts(tokens: Tokens, end_token: int) -> npt.NDArray[np.int64]:
    """Return the place of the token before each document, -1 for the first one, and of the last token."""
    ends = np.flatnonzero(tokens == end_token).astype(np.int64)
    return np.unique(np.concatenate([[-1], ends, [len(tokens) - 1]]))

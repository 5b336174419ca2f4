"""From a corpus to a file of tokens: its pieces encoded by several processes, and put together.

While it is made, ``<file>.parts/`` holds the tokens of each piece and what they are made of, so that the same command
continues where it was interrupted. ``<file>.json`` describes the finished file.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from orchestrator.config.text import did_you_mean
from orchestrator.features.tokenize.pieces import Damaged, TextPiece, documents, pieces_of
from orchestrator.records.json_file import read_json, write_atomically, write_json
from orchestrator.records.lock import locked_if_free

END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
"""What the token after each document is called in published tokenizers."""

_BATCH = 256
"""The documents that are encoded in one call."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a file of tokens is made.

    Attributes:
        output: the file, ``.npy`` or ``.bin``.
        field: where JSON or a table has the text of a document.
        end: the token after each document; None for that of :data:`END_TOKENS` which the tokenizer has.
        skip_damaged: whether lines without a document are left out; otherwise the first one is an error.
    """

    inputs: tuple[Path, ...]
    tokenizer: Path
    output: Path
    field: str = "text"
    end: str | None = None
    skip_damaged: bool = False

    @property
    def parts(self) -> Path:
        return self.output.with_name(f"{self.output.name}.parts")


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """What is in the tokens of a piece, or of a file; ``skipped`` lines had no document, the first few by name."""

    tokens: int
    documents: int
    largest: int
    skipped: int
    named: tuple[str, ...] = ()


def tokenize(recipe: Recipe, *, workers: int, on_progress: Callable[[int, int], None]) -> Encoded:
    """Make a file of tokens. ``on_progress`` is called with the bytes of the corpus so far and with all.

    Raises:
        ValueError: the file exists or another process makes it, an input or the tokenizer is damaged, or the
            interrupted work is of another recipe.
        OSError: a file cannot be read or written.
    """
    if recipe.output.suffix not in (".npy", ".bin"):
        raise ValueError(f"--to={recipe.output}: name a file that ends in .npy or .bin")
    _refuse_existing(recipe)
    tokenizer = _load(recipe.tokenizer)
    end, vocabulary = _end_token(tokenizer, recipe), max(tokenizer.get_vocab().values()) + 1
    dtype = "uint16" if vocabulary <= 2**16 else "uint32"
    pieces = pieces_of(recipe.inputs)
    with _alone(recipe):
        _begin(recipe, end=end, dtype=dtype)
        results: dict[int, Encoded] = {}
        total, done = sum(piece.size for piece in pieces), 0
        try:
            for number, result in _encoded(recipe, pieces, end=end, dtype=dtype, workers=workers):
                results[number] = result
                on_progress(done := done + pieces[number].size, total)
            whole = _sum([results[number] for number in range(len(pieces))])
            if not whole.tokens:
                raise ValueError("the corpus has no documents")
        except ValueError:
            if not any(part.stat().st_size for part in recipe.parts.glob("*.tokens")):
                shutil.rmtree(recipe.parts)  # there is nothing to continue, with these options or with others
            raise
        description = {**asdict(whole), "dtype": dtype, "vocabulary": vocabulary, "end_token": end}
        _join(recipe, len(pieces), dtype=dtype, tokens=whole.tokens, description=description)
    return whole


def _refuse_existing(recipe: Recipe) -> None:
    if recipe.output.exists():
        raise ValueError(f"--to={recipe.output}: exists already; name a file that does not, or remove it")


@contextlib.contextmanager
def _alone(recipe: Recipe) -> Iterator[None]:
    """Be the only process that makes the file, during the block.

    Raises:
        ValueError: another process makes it, or has just made it.
    """
    recipe.parts.mkdir(parents=True, exist_ok=True)
    lock = recipe.parts / "lock"
    with locked_if_free(lock) as free:
        if not free or not lock.exists():  # the other process removes the parts when it has made the file
            raise ValueError(f"--to={recipe.output}: another command makes this file now; name a different one")
        if recipe.output.exists():
            shutil.rmtree(recipe.parts)
        _refuse_existing(recipe)
        yield


def _load(path: Path) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError as e:
        raise ValueError("tokenizers is not installed: pip install tokenizers") from e
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as e:  # it raises nothing more special
        raise ValueError(f"--tokenizer={path}: {e}; set it to a tokenizer.json") from e
    tokenizer.no_truncation()  # a saved tokenizer may cut texts and fill them up
    tokenizer.no_padding()
    return tokenizer


def _end_token(tokenizer: Any, recipe: Recipe) -> int:
    names = END_TOKENS if recipe.end is None else (recipe.end,)
    found = [number for name in names if (number := tokenizer.token_to_id(name)) is not None]
    if not found:
        known = did_you_mean(names[0], [token.content for token in tokenizer.get_added_tokens_decoder().values()])
        raise ValueError(f"--end={recipe.end or 'null'}: {recipe.tokenizer} has no {' or '.join(names)}; {known}")
    return int(found[0])


def _begin(recipe: Recipe, *, end: int, dtype: str) -> None:
    """Note what the parts are made of. Of texts that have changed since, no command can use the parts: remove them.

    Raises:
        ValueError: the parts are of another recipe, whose command can continue them.
    """
    made_of = {
        "inputs": [[str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns] for path in recipe.inputs],
        "tokenizer": hashlib.sha256(recipe.tokenizer.read_bytes()).hexdigest(),
        "field": recipe.field,
        "end": end,
        "dtype": dtype,
    }
    file = recipe.parts / "recipe.json"
    found = read_json(file)
    if found and _of_any_content(found) != _of_any_content(made_of):
        raise ValueError(f"{recipe.parts}: holds interrupted work on other files or with other options; remove it")
    if found and found != made_of:
        for part in recipe.parts.glob("[0-9]*"):
            part.unlink()
    write_json(file, made_of)


def _of_any_content(made_of: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**made_of, "inputs": [path for path, *_ in made_of["inputs"]]}


def _encoded(
    recipe: Recipe, pieces: Sequence[TextPiece], *, end: int, dtype: str, workers: int
) -> Iterator[tuple[int, Encoded]]:
    """Yield the number of each piece when its part is there."""
    missing = []
    for number in range(len(pieces)):
        file = _part(recipe, number, "json")
        if file.exists():
            found = Encoded(**read_json(file))
            _refuse_skipped(recipe, found.named)
            yield number, found
        else:
            missing.append(number)
    workers = min(workers, len(missing))
    if workers <= 1:
        tokenizer = _load(recipe.tokenizer) if missing else None
        yield from ((n, _encode(recipe, n, pieces[n], end=end, dtype=dtype, tokenizer=tokenizer)) for n in missing)
        return
    with ProcessPoolExecutor(workers, get_context("spawn"), _start_worker, (recipe.tokenizer,)) as pool:
        running = {
            pool.submit(_encode, recipe, number, pieces[number], end=end, dtype=dtype): number for number in missing
        }
        try:
            for future in as_completed(running):
                yield running[future], future.result()
        except BrokenProcessPool as e:
            raise ValueError("a process has died, perhaps for lack of memory; the same command continues") from e
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


_tokenizer: Any = None
"""The tokenizer of a process of the pool."""


def _start_worker(path: Path) -> None:
    global _tokenizer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes themselves use all CPUs
    _tokenizer = _load(path)


def _encode(recipe: Recipe, number: int, piece: TextPiece, *, end: int, dtype: str, tokenizer: Any = None) -> Encoded:
    tokens: list[int] = []
    batch: list[str] = []
    count, skipped, named = 0, 0, list[str]()

    def encode_batch() -> None:
        for encoding in (tokenizer or _tokenizer).encode_batch_fast(batch, add_special_tokens=False):
            tokens.extend(encoding.ids)
            if piece.ends:
                tokens.append(end)
        batch.clear()

    for found in documents(piece, recipe.field):
        if isinstance(found, Damaged):
            _refuse_skipped(recipe, (str(found),))
            skipped += 1
            if len(named) < 3:
                named.append(str(found))
            continue
        batch.append(found)
        count += piece.ends
        if len(batch) == _BATCH:
            encode_batch()
    encode_batch()
    array = np.array(tokens, dtype)
    result = Encoded(
        tokens=len(array),
        documents=count,
        largest=int(array.max(initial=0)),
        skipped=skipped,
        named=tuple(named),
    )
    write_atomically(_part(recipe, number, "tokens"), array.tobytes())
    write_json(_part(recipe, number, "json"), asdict(result))  # last: the part is complete
    return result


def _refuse_skipped(recipe: Recipe, names: Sequence[str]) -> None:
    if names and not recipe.skip_damaged:
        raise ValueError(f"{names[0]}; --damaged=skip leaves such lines out")


def _sum(parts: Sequence[Encoded]) -> Encoded:
    return Encoded(
        tokens=sum(part.tokens for part in parts),
        documents=sum(part.documents for part in parts),
        largest=max((part.largest for part in parts), default=0),
        skipped=sum(part.skipped for part in parts),
        named=tuple(name for part in parts for name in part.named)[:3],
    )


def _join(recipe: Recipe, pieces: int, *, dtype: str, tokens: int, description: dict[str, Any]) -> None:
    made = recipe.parts / "whole"
    with made.open("wb") as file:
        if recipe.output.suffix == ".npy":
            header = {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": (tokens,)}
            np.lib.format.write_array_header_1_0(file, header)
        for number in range(pieces):
            with _part(recipe, number, "tokens").open("rb") as part:
                shutil.copyfileobj(part, file)
    write_json(recipe.output.with_name(f"{recipe.output.name}.json"), description)
    made.rename(recipe.output)
    shutil.rmtree(recipe.parts)


def _part(recipe: Recipe, number: int, suffix: str) -> Path:
    return recipe.parts / f"{number:06}.{suffix}"

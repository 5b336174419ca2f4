"""`orchestrator tokenize`: files of tokens for `job=gpt`, from texts, JSONL and parquet."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from helpers.files.golden import Golden
from helpers.ranks.job_trials import errors
from jobs.gpt import GPT
from jobs.tokens import open_source
from orchestrator import tokenize
from orchestrator.features.tokenize import encode, pieces
from orchestrator.records.lock import locked

tokenizers = pytest.importorskip("tokenizers")

WORDS = ["one", "two", "three", "four"]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    """A tokenizer of bytes, merged to pairs; its file is ``tokenizer.json``."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(WORDS, trainer)
    made.save(str(tmp_path / "tokenizer.json"))
    return made


def run(tmp_path: Path, *words: object, to: str = "tokens.npy") -> int:
    return tokenize.main(
        [*map(str, words), "--tokenizer", str(tmp_path / "tokenizer.json"), "--to", str(tmp_path / to)]
    )


def jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("to", ["tokens.npy", "tokens.bin"])
def test_documents_of_all_kinds_are_there_in_order(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, to: str, workers: int
) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", 50)
    texts = [" ".join(WORDS[i % 4 :]) + f" {i}" for i in range(20)]
    first = jsonl(tmp_path / "first.jsonl", texts)
    (tmp_path / "second.txt").write_text(book := "one two\n\n  three\n" * 20)
    parquet.write_table(pa.table({"body": texts, "text": texts}), tmp_path / "third.parquet", row_group_size=7)
    inputs = [first, tmp_path / "second.txt", tmp_path / "third.parquet"]
    assert len(pieces.pieces_of(inputs)) > 10
    assert run(tmp_path, *inputs, "--workers", workers, to=to) == 0
    source = open_source(tmp_path / to, dtype="uint32")
    expected = []
    for text in [*texts, book, *texts]:
        expected += [*tokenizer.encode(text).ids, 0]
    assert source.tokens.tolist() == expected
    assert (source.vocabulary, source.largest, source.end_token) == (tokenizer.get_vocab_size(), max(expected), 0)
    assert source.tokens.dtype == np.uint16, "as described, whatever job.dtype says"
    assert sorted(p.name for p in tmp_path.glob("tokens*")) == [to, f"{to}.json"]


def test_continues_where_it_was_interrupted(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], golden: Golden
) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", 50)
    file = jsonl(tmp_path / "texts.jsonl", WORDS * 10)
    made = list[int]()
    original = encode._encode

    def interrupted(recipe: Any, number: int, *args: Any, **kwargs: Any) -> Any:
        if number == 5 and len(made) == 5:
            raise KeyboardInterrupt
        made.append(number)
        return original(recipe, number, *args, **kwargs)

    monkeypatch.setattr(encode, "_encode", interrupted)
    assert run(tmp_path, file, "--workers", 1) == 130
    assert "the same command continues" in capsys.readouterr().err
    assert not (tmp_path / "tokens.npy").exists()
    assert run(tmp_path, file, "--workers", 1, "--field", "body") == 2
    golden.says(capsys.readouterr().err)
    monkeypatch.setattr(encode, "_encode", original)
    made.clear()
    monkeypatch.setattr(encode, "_encode", lambda *a, **k: made.append(a[1]) or original(*a, **k))
    assert run(tmp_path, file, "--workers", 1) == 0
    assert min(made) == 5, "the first parts are kept"
    assert len(open_source(tmp_path / "tokens.npy", dtype="uint16").tokens) == 10 * sum(
        len(tokenizer.encode(word).ids) + 1 for word in WORDS
    )


DAMAGED = '{"text": "one"}\n\n{"text": 3}\n{"text": ""}\n[\n{"body": "two"}\n{"text": "two"}'


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_saved_tokenizer_neither_cuts_texts_nor_fills_them_up(
    tmp_path: Path, tokenizer: Any, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", 50)
    texts = ["one two three four", "two", "\N{GRINNING FACE}"] * 5
    expected = [token for text in texts for token in [*tokenizer.encode(text).ids, 0]]
    tokenizer.enable_truncation(max_length=3)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert run(tmp_path, jsonl(tmp_path / "texts.jsonl", texts), "--workers", workers) == 0
    assert open_source(tmp_path / "tokens.npy", dtype="uint16").tokens.tolist() == expected
    encode_prompt, _ = GPT(tokenizer=str(tmp_path / "tokenizer.json"))._codec()
    assert encode_prompt("one two three four") == expected[: expected.index(0)], "prompts of samples too"


def test_one_command_at_a_time_makes_a_file(
    tmp_path: Path, tokenizer: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    file = jsonl(tmp_path / "texts.jsonl", WORDS)
    parts = tmp_path / "tokens.npy.parts"
    parts.mkdir()
    with locked(parts / "lock"):
        assert run(tmp_path, file, "--workers", 1) == 2
    golden.says(capsys.readouterr().err)
    original = encode.pieces_of

    def overtaken(paths: Any) -> Any:
        monkeypatch.setattr(encode, "pieces_of", original)
        assert run(tmp_path, file, "--workers", 1) == 0
        return original(paths)

    monkeypatch.setattr(encode, "pieces_of", overtaken)
    assert run(tmp_path, file, "--workers", 1) == 2
    assert "tokens.npy: exists already" in capsys.readouterr().err
    assert not parts.exists()


def test_damaged_lines_are_refused_or_counted_and_named(
    tmp_path: Path, tokenizer: Any, capsys: pytest.CaptureFixture[str], golden: Golden
) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text(DAMAGED)
    assert run(tmp_path, file, "--workers", 1) == 2
    golden.says(capsys.readouterr().err)
    assert run(tmp_path, file, "--workers", 1, "--damaged", "skip") == 0
    output = capsys.readouterr()
    assert "of 2 documents" in output.out
    assert "5 without text skipped" in output.out
    golden.says(output.err)


def test_texts_that_were_mended_are_encoded_anew(tmp_path: Path, tokenizer: Any) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text(DAMAGED)
    assert run(tmp_path, file, "--workers", 1) == 2
    jsonl(file, WORDS)
    assert run(tmp_path, file, "--workers", 1) == 0
    ends = open_source(tmp_path / "tokens.npy", dtype="uint16").tokens == 0
    assert ends.sum() == len(WORDS)


def test_a_command_that_is_refused_at_once_leaves_nothing(tmp_path: Path, tokenizer: Any) -> None:
    file, empty = jsonl(tmp_path / "texts.jsonl", WORDS), tmp_path / "empty.txt"
    empty.touch()
    before = sorted(tmp_path.iterdir())
    for words in ([file, "--field", "body"], [empty]):
        assert run(tmp_path, *words, "--workers", 1) == 2
        assert sorted(tmp_path.iterdir()) == before
    assert run(tmp_path, file, "--workers", 1) == 0, "with the right options"


def test_a_missing_package_is_named_with_the_command_that_installs_it(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = jsonl(tmp_path / "texts.jsonl", WORDS)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert run(tmp_path, file) == 2
    said = "tokenizers is not installed: pip install tokenizers"
    assert capsys.readouterr().err == f"tokenize: {said}\n"
    (error,) = errors("jobs.gpt.GPT", tokenizer=str(tmp_path / "tokenizer.json"))
    assert error.endswith(said)


def test_says_what_is_wrong(tmp_path: Path, tokenizer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    file = jsonl(tmp_path / "texts.jsonl", WORDS)
    (tmp_path / "latin.txt").write_bytes(b"one \xe9")
    (tmp_path / "no.parquet").write_text("one")
    parquet.write_table(pa.table({"body": WORDS}), tmp_path / "body.parquet")
    (tmp_path / "deep.jsonl").write_text('{"text": "one"}\n' + "[" * 200_000 + "\n")
    (tmp_path / "half.jsonl").write_text('{"text": "one"}\n{"text": "one \\ud83d two"}\n')
    (tmp_path / "byte.jsonl").write_bytes(b'{"text": "one"}\n{"text": "\xed\xa0\xbd"}\n')
    (tmp_path / "empty.txt").touch()
    (tmp_path / "taken.npy").touch()
    here = f"tokenize: {tmp_path}"
    for words, to, reason in (
        ([tmp_path / "gone.txt"], "a.npy", f"{here}/gone.txt: No such file"),
        ([file], "a.txt", f"tokenize: --to={tmp_path}/a.txt: name a file that ends in .npy or .bin"),
        ([file], "taken.npy", f"tokenize: --to={tmp_path}/taken.npy: exists already"),
        ([tmp_path / "latin.txt"], "b.npy", f"{here}/latin.txt: byte 5 is not UTF-8"),
        ([tmp_path / "deep.jsonl"], "l.npy", f"{here}/deep.jsonl, line 2: it is no JSON (maximum recursion depth"),
        ([tmp_path / "half.jsonl"], "m.npy", f"{here}/half.jsonl, line 2: its 'text' has half a character, \\ud83d;"),
        ([tmp_path / "byte.jsonl"], "n.npy", f"{here}/byte.jsonl, line 2: it is not UTF-8;"),
        ([tmp_path / "no.parquet"], "c.npy", f"{here}/no.parquet: Parquet file size is 3 bytes"),
        ([tmp_path / "body.parquet"], "d.npy", f"{here}/body.parquet: has no column 'text', but body; --field names"),
        ([tmp_path / "empty.txt"], "e.npy", "tokenize: the corpus has no documents"),
        ([file, "--end", "<|endoftxt|>"], "f.npy", "has no <|endoftxt|>; did you mean <|endoftext|>?"),
        ([file, "--field", "body"], "g.npy", f"{here}/texts.jsonl, line 1: it has no field 'body'"),
    ):
        assert run(tmp_path, *words, "--workers", 1, to=to) == 2
        assert reason in capsys.readouterr().err
    (tmp_path / "tokenizer.json").write_text("{")
    assert run(tmp_path, file, to="h.npy") == 2
    assert f"tokenize: --tokenizer={tmp_path}/tokenizer.json: " in capsys.readouterr().err


def test_a_file_that_was_cut_short_is_refused_before_training(tmp_path: Path, tokenizer: Any, golden: Golden) -> None:
    file = jsonl(tmp_path / "texts.jsonl", WORDS * 100)
    assert run(tmp_path, file, "--workers", 1, to="tokens.bin") == 0
    path = tmp_path / "tokens.bin"
    tokens = path.stat().st_size // 2
    fields = {"path": str(path), "context": 16}
    (error,) = errors("jobs.gpt.GPT", **fields, vocabulary=257)
    assert f"set job.vocabulary={tokenizer.get_vocab_size()}" in error
    assert errors("jobs.gpt.GPT", **fields, vocabulary=290, end_token=0) == []
    (error,) = errors("jobs.gpt.GPT", **fields, vocabulary=290, end_token=7)
    golden.says(error)
    path.write_bytes(path.read_bytes()[:-4])
    (error,) = errors("jobs.gpt.GPT", **fields, vocabulary=290)
    assert error.startswith(f"job.path={path}: has {tokens - 2} tokens, but {tokens} by {path}.json: it is cut short")

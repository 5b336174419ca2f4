"""`orchestrator tokenize` relative to `encode_batch_fast` of `tokenizers`, and waits for tokens in training.

python benchmarks/tokens.py

Both tokenise the same lines of JSON, parsed in the same way, on all CPUs: ours with a process for each, which write a
file of tokens; theirs with its own threads, and nothing is written. Then a small model is trained on that file.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics

from harness.arms import environment
from harness.disturbance import undisturbed
from harness.rounds import Claim, argument_parser, interleave, report

from orchestrator.features.tokenize.encode import Recipe, tokenize
from orchestrator.records.journal import read_lines
from orchestrator.records.run_dir import RunDir

ROUNDS = 5
COPIES = 100
"""How often the help texts of Python, of half a megabyte, are in the corpus."""
VOCABULARY = 1024
TIMEOUT_S = 600


def write_corpus(folder: Path, copies: int) -> tuple[Path, Path]:
    """Return a file of lines of JSON, and a tokenizer for them."""
    from tokenizers import ByteLevelBPETokenizer

    lines, tokenizer = folder / "corpus.jsonl", ByteLevelBPETokenizer()
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in topics.values()) * copies)
    tokenizer.train_from_iterator(
        topics.values(), vocab_size=VOCABULARY, special_tokens=["<|endoftext|>"], show_progress=False
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return lines, folder / "tokenizer.json"


def ours(lines: Path, tokenizer: Path, output: Path) -> None:
    """Make a file of tokens."""
    recipe = Recipe(inputs=(lines,), tokenizer=tokenizer, output=output)
    tokenize(recipe, workers=os.cpu_count() or 1, on_progress=lambda done, total: None)


def theirs(lines: Path, tokenizer: Path) -> None:
    """Encode the texts, without keeping the tokens."""
    from tokenizers import Tokenizer

    texts = [json.loads(line)["text"] for line in lines.read_text().splitlines()]
    Tokenizer.from_file(str(tokenizer)).encode_batch_fast(texts, add_special_tokens=False)


def tokenising(folder: Path, rounds: int, copies: int) -> list[float]:
    """Return the rate of ours over theirs in each round; ``tokens.npy`` in ``folder`` is of the last one."""
    lines, tokenizer = write_corpus(folder, copies)

    def time_ours(empty: Path) -> float:
        began = time.perf_counter()
        ours(lines, tokenizer, empty / "tokens.npy")
        seconds = time.perf_counter() - began
        shutil.move(empty / "tokens.npy", folder / "tokens.npy")
        return seconds

    def time_theirs(_: Path) -> float:
        began = time.perf_counter()
        theirs(lines, tokenizer)
        return time.perf_counter() - began

    found = interleave({"ours": time_ours, "theirs": time_theirs}, rounds=rounds, text="{:.2f} s".format)
    return [r["theirs"] / r["ours"] for r in found]


def waiting(folder: Path, steps: int) -> list[float]:
    """Return the share of each logged window that a worker waited for its batches, in percent."""
    words = ["strategy=single", "job=gpt", f"job.path=[{folder / 'tokens.npy'}]", f"job.vocabulary={VOCABULARY}"]
    words += ["job.width=128", "job.context=128", f"train.steps={steps}", "train.eval_every=0", "tracking=none"]
    subprocess.run(
        [sys.executable, "-m", "orchestrator.launch", *words, f"output_dir={folder / 'runs'}"],
        env=environment(),
        check=True,
        stdout=subprocess.DEVNULL,
        timeout=TIMEOUT_S,
    )
    (record,) = (folder / "runs").glob("*/*/run.json")
    points = [point for point, _ in read_lines(RunDir(record.parent).metrics_file)]
    return [point["perf/data_wait_pct"] for point in points if "perf/data_wait_pct" in point][1:]


def main() -> None:
    arguments = argument_parser(__doc__).parse_args()
    quick = arguments.quick
    with tempfile.TemporaryDirectory() as folder:
        rates = tokenising(Path(folder), 1 if quick else ROUNDS, COPIES // 5 if quick else COPIES)
        waits = undisturbed(partial(waiting, Path(folder), 40 if quick else 200))
    report(
        "tokens",
        [
            Claim(name="rate of tokenising, ours / tokenizers", ratios=rates, at_least=0.9),
            Claim(name="waiting for tokens, % of a step", ratios=waits, at_most=1.0),
        ],
        ceiling=None,
        rounds={},
        notes="",
        keep=not quick,
    )


if __name__ == "__main__":
    main()

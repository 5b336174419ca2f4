"""Make a file of tokens from texts: ``orchestrator tokenize my.jsonl --tokenizer tokenizer.json --to train.npy``.

Exit codes: 0 done; 2 wrong arguments or files; 130 interrupted: the same command continues.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from orchestrator.display.plain_text import refuse, size, writable
from orchestrator.display.terminal import LINE_EVERY_S, closing_interrupts
from orchestrator.verb_options import INTERRUPTED, positive


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb with the arguments ``argv`` (default: ``sys.argv[1:]``); returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="orchestrator tokenize", description="Make a file of tokens from texts, for job=gpt."
    )
    parser.add_argument(
        "inputs",
        nargs="+",
        type=Path,
        metavar="FILE",
        help=".jsonl with a document in each line, .parquet with one in each row, or a text, which is one document",
    )
    parser.add_argument("--tokenizer", type=Path, required=True, help="a tokenizer.json, or a directory that has one")
    parser.add_argument("--to", type=Path, required=True, metavar="FILE", help="the new file, .npy or .bin")
    parser.add_argument("--field", default="text", help="the field or column with the text (default: text)")
    parser.add_argument("--end", metavar="TOKEN", help="the token after each document (default: the tokenizer's own)")
    parser.add_argument(
        "--damaged",
        choices=("refuse", "skip"),
        default="refuse",
        help="what to do with lines and rows that hold no document, or an empty one (default: refuse)",
    )
    parser.add_argument(
        "--workers", type=positive, default=os.cpu_count() or 1, help="the number of processes (default: one per CPU)"
    )
    options = parser.parse_args(argv)
    with closing_interrupts():
        try:
            return _tokenize(options)
        except OSError as e:
            return refuse("tokenize", f"{e.filename}: {e.strerror}" if e.filename else e)
        except ValueError as e:
            return refuse("tokenize", e)
        except KeyboardInterrupt:
            print("tokenize: interrupted; the same command continues", file=sys.stderr)
            return INTERRUPTED


def _tokenize(options: argparse.Namespace) -> int:
    # Imported here because --help must not wait for NumPy.
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    from orchestrator.features.tokenize.encode import Recipe, tokenize

    tokenizer = options.tokenizer
    recipe = Recipe(
        inputs=tuple(options.inputs),
        tokenizer=tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer,
        output=options.to,
        field=options.field,
        end=options.end,
        skip_damaged=options.damaged == "skip",
    )
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    printed_at = time.monotonic()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=None)

        def show(done: int, total: int) -> None:
            nonlocal printed_at
            progress.update(bar, completed=done, total=total)
            if not console.is_terminal and time.monotonic() - printed_at >= LINE_EVERY_S:
                printed_at = time.monotonic()
                print(f"tokenize: {size(done)} of {size(total)}", file=sys.stderr, flush=True)

        made = tokenize(recipe, workers=options.workers, on_progress=show)
    for name in made.named:
        print(writable(f"skipped: {name}", sys.stderr), file=sys.stderr)
    skipped = f"; {made.skipped:,} without text skipped" if made.skipped else ""
    text = f"{made.tokens:,} tokens of {made.documents:,} documents are in {recipe.output}{skipped}"
    print(writable(text, sys.stdout))
    return 0


if __name__ == "__main__":
    sys.exit(main())

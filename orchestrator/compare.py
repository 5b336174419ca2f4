"""Show runs side by side, as a table and as a picture: ``orchestrator compare --last 5``.

Exit codes: 0 done; 1 the picture cannot be written; 2 wrong arguments, or no run that can be read.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

from orchestrator.display.comparison import CompareError, Run, read_run, table
from orchestrator.display.comparison_plot import draw
from orchestrator.display.text import writable
from orchestrator.records.output_dir import OutputDir, fetch, find_run
from orchestrator.storage.remote import StorageError, is_url


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb with the arguments ``argv`` (default: ``sys.argv[1:]``); returns the exit code."""
    options = _parser().parse_args(argv)
    try:
        runs = _chosen_runs(options)
    except (CompareError, StorageError) as e:
        print(writable(f"compare: {e}", sys.stderr), file=sys.stderr)
        return 2
    print(writable(table(runs), sys.stdout))
    if options.no_picture:
        return 0
    path = options.picture or Path("" if is_url(options.output_dir) else options.output_dir) / "compare.png"
    try:
        draw(runs, path)
    except OSError as e:
        print(f"compare: cannot write the picture: {e}; choose --picture PATH", file=sys.stderr)
        return 1
    print(f"\npicture: {path}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="orchestrator compare", description="Show runs side by side, as a table and as a picture."
    )
    parser.add_argument("runs", nargs="*", help="run directories or their URLs (default: the newest runs)")
    parser.add_argument(
        "--last",
        type=_positive,
        default=5,
        metavar="N",
        help="number of newest runs (default: 5)",
    )
    parser.add_argument("--output-dir", default="outputs", help="directory or URL with the runs (default: outputs)")
    parser.add_argument(
        "--picture",
        type=Path,
        help="the file for the picture (default: <output-dir>/compare.png; for a URL, compare.png)",
    )
    parser.add_argument("--no-picture", action="store_true", help="print only the table")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected a whole number of at least 1")
    return int(text)


def _chosen_runs(options: argparse.Namespace) -> list[Run]:
    """The given runs in their order, or the newest ones, oldest first."""
    if options.runs:
        return [read_run(_local(text)) for text in options.runs]
    output = OutputDir.of(options.output_dir)
    found = list(itertools.islice(output.runs(), options.last))
    if not found:
        where = output.path.resolve() if output.remote is None else output
        raise CompareError(
            f"no runs in {where}; start one with "
            "`python -m orchestrator.launch`, or pass another directory with --output-dir"
        )
    for run in found:
        fetch(run, [run.metrics_file.name])
    return [read_run(run.path) for run in reversed(found)]


def _local(text: str) -> Path:
    """Return the directory with the files of the run at a path or URL."""
    if not is_url(text):
        return Path(text)
    if (run := find_run(text)) is None:
        raise CompareError(f"{text}: not a run directory, it has no run.json")
    fetch(run, [run.metrics_file.name])
    return run.path


if __name__ == "__main__":
    sys.exit(main())

"""Show runs side by side: ``orchestrator compare --last 5``. As a table and as a picture.

Exit codes: 0 done; 1 the picture cannot be written, or the server cannot be reached; 2 wrong arguments, or no run that
can be read; 4 the connection to the cluster was lost.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator import features
from orchestrator.display.comparison import CURVE_METRICS, ComparedRun, CompareError, curve_of, read_run, run_of
from orchestrator.display.plain_text import refuse, writable
from orchestrator.features.sweep.comparison_analysis import Comparison, verdict
from orchestrator.features.sweep.comparison_report import draw, rows, table
from orchestrator.records.output_dir import fetch
from orchestrator.records.run_dir import RunDir
from orchestrator.records.run_search import RunSearch
from orchestrator.run_verbs import run_verb
from orchestrator.verb_options import add_run_search, finite, positive

if TYPE_CHECKING:
    from orchestrator.features.tracking.mlflow_runs import TrackedRun


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb with the arguments ``argv`` (default: ``sys.argv[1:]``); returns the exit code."""
    return run_verb("compare", _parser(), _compare, argv)


def _compare(options: argparse.Namespace, search: RunSearch) -> int:
    try:
        runs = _chosen_runs(options, search)
    except CompareError as e:
        return refuse("compare", e)
    except _ServerError as e:
        return refuse("compare", e, code=1)
    comparison = Comparison(runs, options.target_loss)
    shown = comparison.grouped if options.group else comparison
    if options.json:
        print(json.dumps({"verdict": verdict(comparison), "runs": rows(shown)}, indent=2))
    elif options.csv:
        _print_csv(shown)
    else:
        _print_table(shown, comparison)
    if options.no_picture or (options.picture is None and (options.json or options.csv or options.address)):
        return 0
    picture = options.picture or _folder(search) / "compare.png"
    try:
        draw(comparison, picture)
    except OSError as e:
        return refuse("compare", f"cannot write the picture: {e}; choose --picture PATH", code=1)
    print(f"\npicture: {picture}", file=sys.stderr if options.json or options.csv else sys.stdout)
    return 0


def _folder(search: RunSearch) -> Path:
    """The directory for the picture: where the runs are, if that is here."""
    first = search.outputs[0]
    return first.path if first.remote is None and first.path.is_dir() else Path()


class _ServerError(Exception):
    """The tracking server cannot be read."""


def _print_table(shown: Comparison, comparison: Comparison) -> None:
    lines = [table(shown), *(verdict(comparison) if len(comparison.runs) > 1 else [])]
    if shown is comparison and comparison.has_repeats:
        lines.append("--group shows repeats as one row, with mean and spread")
    print(writable("\n".join(lines), sys.stdout))


def _print_csv(comparison: Comparison) -> None:
    found = rows(comparison)
    heads = dict.fromkeys(key for row in found for key in row)
    writer = csv.DictWriter(sys.stdout, fieldnames=list(heads), lineterminator="\n")
    writer.writeheader()
    writer.writerows(found)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="orchestrator compare", description="Show runs side by side: as a table and as a picture."
    )
    parser.add_argument(
        "runs",
        nargs="*",
        help="names of runs, run directories, their URLs, <date>/<time>-<name> or <time>-<name> (default: the newest "
        "runs)",
    )
    parser.add_argument("--last", type=positive, default=5, metavar="N", help="number of newest runs (default: 5)")
    parser.add_argument("--sweep", metavar="ID", help="the runs of a sweep, by the beginning of its id; or `last`")
    parser.add_argument("--mlflow", metavar="URI", help="read the runs from this MLflow server instead")
    add_run_search(parser)
    parser.add_argument("--group", action="store_true", help="one row for the repeats of a run: mean and spread")
    parser.add_argument("--target-loss", type=finite, metavar="X", help="show the time to this training loss")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON instead of a table")
    form.add_argument("--csv", action="store_true", help="print CSV instead of a table")
    parser.add_argument(
        "--picture",
        type=Path,
        help="the file for the picture (default: <output-dir>/compare.png; for a URL, compare.png; with --address, "
        "none, because it would be on the cluster)",
    )
    parser.add_argument("--no-picture", action="store_true", help="write no picture")
    return parser


def _chosen_runs(options: argparse.Namespace, search: RunSearch) -> list[ComparedRun]:
    """The given runs in their order, or the newest ones, oldest first."""
    if options.mlflow is not None:
        return _tracked_runs(options)
    if options.runs:
        return [_read(search.look_up(text)) for text in options.runs]
    if options.sweep is not None:
        found = _sweep_runs(_readable(search.runs()), options.sweep)
        missing = f"no runs of the sweep {options.sweep} in {search}"
    else:
        found = list(itertools.islice(_readable(search.runs()), options.last))
        missing = (
            f"no runs in {search}; start one with "
            "`python -m orchestrator.launch`, or pass another directory with --output-dir"
        )
    if not found:
        raise CompareError(missing)
    return [_read(run) for run in reversed(found)]


def _readable(runs: Iterable[RunDir]) -> Iterator[RunDir]:
    """Yield the runs whose record can be read, and name the others."""
    for run in runs:
        try:
            run.read_record()
        except (OSError, ValueError) as e:
            print(writable(f"warning: run left out: {e}", sys.stderr), file=sys.stderr)
        else:
            yield run


def _read(run_dir: RunDir) -> ComparedRun:
    fetch(run_dir, [run_dir.metrics_file.name])
    return read_run(run_dir.path)


def _sweep_runs(runs: Iterable[RunDir], sweep: str) -> list[RunDir]:
    """The runs of the sweep whose id begins with ``sweep``, or of the newest one for ``last``."""
    found = []
    for run in runs:
        own = (run.read_record().get("sweep") or {}).get("id", "")
        if own and sweep == "last":
            sweep = own
        if own and own.startswith(sweep):
            found.append(run)
    return found


def _tracked_runs(options: argparse.Namespace) -> list[ComparedRun]:
    if not features.paths("mlflow_runs.py"):
        raise CompareError("--mlflow: this installation reads no MLflow server; leave it out")
    from orchestrator.features.tracking.mlflow_runs import newest_runs
    from orchestrator.features.tracking.uri import absolute_uri, redact_uri, validate_uri

    if error := validate_uri(options.mlflow):
        raise CompareError(f"--mlflow: {error}")
    uri = absolute_uri(options.mlflow, Path.cwd())
    try:
        found = [_of_server(run, redact_uri(uri)) for run in newest_runs(uri, most=options.last, sweep=options.sweep)]
    except Exception as e:  # of any type: MLflow, database drivers, HTTP
        raise _ServerError(f"{redact_uri(uri)}: {type(e).__name__}: {redact_uri(str(e))}") from None
    if not found:
        raise CompareError(
            f"no runs on {redact_uri(uri)}" + (f" of the sweep {options.sweep}" if options.sweep else "")
        )
    return found[::-1]


def _of_server(run: TrackedRun, uri: str) -> ComparedRun:
    name = f"{run.record['name']} {run.run_id[:8]}"
    location = f"{uri}/{run.run_id}"
    return run_of(run.record, name=name, location=location, curve=lambda: curve_of(run.points(*CURVE_METRICS)))


if __name__ == "__main__":
    sys.exit(main())

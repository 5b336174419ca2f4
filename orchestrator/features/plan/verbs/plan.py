"""Plan a job for a cluster that is not here: ``orchestrator plan --cluster 64x8xH100 job=gpt job.size=8b``.

Which layouts fit, how fast each is, what it costs, and how far off such predictions are of published runs. Starts
nothing. ``--published FILE.csv`` predicts the runs of a file instead.

Exit codes: 0 done; 1 no layout fits, or the picture cannot be written; 2 wrong arguments.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from orchestrator.config.build import ConfigError
from orchestrator.config.files import there
from orchestrator.config.overrides import last_of_each
from orchestrator.config.redact import Redactor
from orchestrator.display.plain_text import refuse, say_note, writable
from orchestrator.driver.preflight.early_checks import refuse_early
from orchestrator.records.output_dir import fetch
from orchestrator.records.run_dir import RunDir
from orchestrator.records.run_search import RunSearch
from orchestrator.verb_options import (
    FAILED,
    above_zero,
    add_files,
    file_words,
    positive,
)
from orchestrator.verb_outcome import outcome

_PICTURES = (".png", ".svg", ".pdf")
_UNITS = {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb with the arguments ``argv`` (default: ``sys.argv[1:]``); returns the exit code."""
    parser = _parser()
    options = parser.parse_intermixed_args(list(sys.argv[1:] if argv is None else argv))
    if (options.cluster is None) == (options.published is None):
        parser.error("give --cluster or --published FILE.csv")
    redactor = Redactor.of_process()
    return outcome("plan", lambda: _published(options) if options.published else _plan(options, redactor), redactor)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="orchestrator plan",
        description="Predict which layouts of a job fit a cluster that is not here, how fast they are and what they "
        "cost, with the errors of such predictions. Starts nothing.",
    )
    parser.add_argument("words", nargs="*", metavar="key=value", help="as for `orchestrator launch`")
    parser.add_argument(
        "--cluster", metavar="NODESxDEVICESxNAME", help="for example 64x8xH100; 1x2xcpu: two CPUs of this machine"
    )
    parser.add_argument("--link", metavar="NAME", help="between nodes (default: the usual one of the device)")
    parser.add_argument("--devices", metavar="FILE", type=Path, help="YAML file with devices and links of yours")
    parser.add_argument("--tokens", type=_number, help="tokens of the whole run, as in 1T: for days and money")
    parser.add_argument("--price", type=above_zero, help="of an hour of a device: for money; needs --tokens")
    parser.add_argument("--failure-hours", type=above_zero, help="mean hours between the failures of one device")
    parser.add_argument("--measured", metavar="RUN", help="take the shares of the peak rates from a run of yours")
    parser.add_argument("--published", metavar="FILE.csv", type=Path, help="predict the runs of a file instead")
    parser.add_argument("--rows", type=positive, default=10, help="layouts to show (default: 10)")
    parser.add_argument("--picture", metavar="FILE.png", type=_picture, help="draw the time of a step by what takes it")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    add_files(parser)
    return parser


def _number(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMBT]?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text}: expected a number such as 15e9, written as 15B, or 1T")
    return above_zero(match[1]) * _UNITS[match[2]]


def _picture(text: str) -> Path:
    path = Path(text)
    if path.suffix.lower() not in _PICTURES:
        raise argparse.ArgumentTypeError(f"{text}: expected a file that ends with {' or '.join(_PICTURES)}")
    if not there(path.parent.is_dir):
        raise argparse.ArgumentTypeError(f"{text}: there is no directory {path.parent}")
    return path


def _published(options: argparse.Namespace) -> int:
    from orchestrator.features.plan.prediction.calibration import compare
    from orchestrator.features.plan.prediction.devices import read_tables
    from orchestrator.features.plan.prediction.published import read_rows
    from orchestrator.features.plan.shown import published_json, published_table

    compared = compare(read_rows(options.published), read_tables(options.devices))
    print(
        json.dumps(published_json(compared), indent=2)
        if options.json
        else writable(published_table(compared), sys.stdout)
    )
    return 0


def _run(text: str) -> RunDir:
    try:
        run_dir = RunSearch.of(None).look_up(text, trained=True)
        fetch(run_dir, [run_dir.config_file.name])
    except (OSError, ValueError) as e:
        raise ConfigError([f"--measured {e}"]) from e
    return run_dir


def _plan(options: argparse.Namespace, redactor: Redactor) -> int:
    from orchestrator.features.plan.prediction.devices import CPU, parse_cluster, read_tables

    tables = read_tables(options.devices)
    # Imported here because --help and a wrong name must not wait seconds for torch.
    if options.cluster.endswith(f"x{CPU}"):
        from orchestrator.features.plan.model_work import with_cpus

        tables = with_cpus(tables)
    cluster = parse_cluster(options.cluster, tables, link=options.link)
    words = last_of_each([*file_words(options), *options.words], say_note)
    refuse_early([words], redactor, starts_here=False)
    from orchestrator.features.plan.forecasts import answer
    from orchestrator.features.plan.shown import as_json, draw, text

    with contextlib.redirect_stdout(sys.stderr):  # what the job prints
        answered = answer(
            words,
            cluster,
            redactor,
            tokens=options.tokens,
            price=options.price,
            device_hours=options.failure_hours,
            measured=None if options.measured is None else _run(options.measured),
        )
    if options.json:
        print(json.dumps(as_json(answered), indent=2))
    else:
        print(writable(text(answered, rows=options.rows), sys.stdout))
    if options.picture is not None and answered.fitting:
        try:
            draw(answered, options.picture)
        except OSError as e:
            return refuse("plan", f"cannot write the picture: {e}; choose --picture FILE.png", code=FAILED)
    return 0 if answered.fitting else FAILED


if __name__ == "__main__":
    sys.exit(main())

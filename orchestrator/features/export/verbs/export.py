"""Write the model of a run as files for other programs: ``orchestrator export <run> --format hf``.

Exit codes: 0 done; 2 wrong arguments, no such run or checkpoint, a job that cannot be exported, or an export that
computes something else than the trained model.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from orchestrator.config.redact import Redactor
from orchestrator.display.plain_text import writable
from orchestrator.display.terminal import closing_interrupts, still_working
from orchestrator.records.output_dir import fetch
from orchestrator.records.run_search import RunSearch
from orchestrator.verb_options import add_run
from orchestrator.verb_outcome import outcome


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb with the arguments ``argv`` (default: ``sys.argv[1:]``); returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="orchestrator export", description="Write the model of a run as files for other programs."
    )
    add_run(parser)
    parser.add_argument(
        "--format", default="hf", help="what to write, as the job knows it (default: hf, a directory of Hugging Face)"
    )
    parser.add_argument("--to", metavar="DIR", type=Path, help="a new directory (default: <name of the run>-<format>)")
    parser.add_argument("--best", action="store_true", help="the checkpoint of its best evaluation, not the newest one")
    options = parser.parse_args(argv)
    redactor = Redactor.of_process()
    with closing_interrupts():
        return outcome("export", lambda: _export(options, redactor), redactor, refused=(OSError, ValueError))


def _export(options: argparse.Namespace, redactor: Redactor) -> int:
    if options.address is not None:
        raise ValueError(f"--address={options.address}: run `orchestrator export` where the run is, or with its URL")
    run_dir = RunSearch.of(options.output_dir).look_up(options.run, trained=True)
    fetch(run_dir, [run_dir.config_file.name])
    directory = options.to or Path(f"{run_dir.read_record().get('name', 'run')}-{options.format}")
    # Imported here because --help must not wait for torch.
    from orchestrator.features.export.formats import export_run

    with still_working(lambda: f"export: the model of {run_dir.location} is being written"):
        made = export_run(
            run_dir, directory.expanduser().absolute(), redactor, format=options.format, best=options.best
        )
    weights = ", with averaged weights," if made.averaged else ""
    print(writable(f"the model after step {made.step:,}{weights} is in {directory}", sys.stdout))
    print(writable(made.comparison.text(), sys.stdout))
    return 0


if __name__ == "__main__":
    sys.exit(main())

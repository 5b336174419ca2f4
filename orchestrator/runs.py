"""List the newest runs: ``orchestrator runs``.

Exit codes: 0 done, also if there are no runs; 2 wrong arguments, or the directory cannot be read.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from orchestrator.config.options import add_output_dir, positive
from orchestrator.display.comparison import CompareError, Run, read_run
from orchestrator.display.run_list import plain, run_list
from orchestrator.display.text import refuse, writable
from orchestrator.records.output_dir import OutputDir
from orchestrator.records.run_dir import ACTIVE_STATES, state_of
from orchestrator.storage.remote import StorageError

STATES = (*ACTIVE_STATES, "finished", "failed", "killed", "died")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb with the arguments ``argv`` (default: ``sys.argv[1:]``); returns the exit code."""
    parser = argparse.ArgumentParser(prog="orchestrator runs", description="List the newest runs, the newest first.")
    parser.add_argument("--last", type=positive, default=20, metavar="N", help="number of runs (default: 20)")
    parser.add_argument("--state", choices=STATES, help="only runs in this state; died: without an end and a driver")
    add_output_dir(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(argv)
    try:
        found = list(itertools.islice(_runs(OutputDir.of(options.output_dir), options.state), options.last))
    except StorageError as e:
        return refuse("runs", e)
    if options.json:
        print(json.dumps(plain(found), indent=2))
    elif found:
        print(writable(run_list(found, now=time.time()), sys.stdout))
    else:
        print(f"no runs in {options.output_dir}; start one with `python -m orchestrator.launch`", file=sys.stderr)
    return 0


def _runs(output: OutputDir, state: str | None) -> Iterator[Run]:
    """The runs in this state, the newest first; an unreadable one is reported and left out."""
    for run_dir in output.runs():
        try:
            run = replace(read_run(run_dir.path), state=state_of(run_dir), location=run_dir.location)
        except (CompareError, ValueError) as e:
            print(writable(f"warning: {e}", sys.stderr), file=sys.stderr)
            continue
        if state in (None, run.state):
            yield run


if __name__ == "__main__":
    sys.exit(main())

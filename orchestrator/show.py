"""Tell what a run was and how it went: ``orchestrator show <run>``.

Exit codes: 0 done; 2 wrong arguments, or no such run.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from orchestrator.config.options import add_run
from orchestrator.display.run_report import run_report
from orchestrator.display.text import refuse, writable
from orchestrator.records.output_dir import fetch, look_up_run
from orchestrator.records.run_dir import RunDir, state_of
from orchestrator.storage.remote import StorageError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb with the arguments ``argv`` (default: ``sys.argv[1:]``); returns the exit code."""
    parser = argparse.ArgumentParser(prog="orchestrator show", description="Tell what a run was and how it went.")
    add_run(parser, default="last")
    options = parser.parse_args(argv)
    try:
        run_dir = look_up_run(options.run, options.output_dir)
        fetch(run_dir)
        print(writable(_report(run_dir), sys.stdout))
    except (StorageError, ValueError) as e:
        return refuse("show", e)
    return 0


def _report(run_dir: RunDir) -> str:
    return run_report(run_dir, run_dir.read_record(), state=state_of(run_dir), now=time.time())


if __name__ == "__main__":
    sys.exit(main())

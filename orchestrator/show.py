"""Tell what a run was and how it went: ``orchestrator show <run>``.

Exit codes: 0 done; 2 wrong arguments, or no such run; 4 the connection to the cluster was lost.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from itertools import islice

from orchestrator.display.plain_text import writable
from orchestrator.display.run_report import run_report
from orchestrator.driver.process.origin import this_origin
from orchestrator.records.output_dir import fetch
from orchestrator.records.run_dir import state_of
from orchestrator.records.run_search import RunSearch
from orchestrator.run_verbs import run_verb
from orchestrator.verb_options import add_run


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb with the arguments ``argv`` (default: ``sys.argv[1:]``); returns the exit code."""
    parser = argparse.ArgumentParser(prog="orchestrator show", description="Tell what a run was and how it went.")
    add_run(parser, default="last")
    return run_verb("show", parser, _show, argv)


def _show(options: argparse.Namespace, search: RunSearch) -> int:
    run_dir = search.look_up(options.run)
    others = [run.location for run in islice(search.named(options.run), 2)]
    if others[:1] == [run_dir.location] and len(others) > 1:
        note = f"note: several runs are called {options.run}; this is the newest, after {others[1]}"
        print(writable(note, sys.stderr), file=sys.stderr)
    fetch(run_dir)
    state, verb = state_of(run_dir), this_origin().verb
    report = run_report(run_dir, run_dir.read_record(), state=state, now=time.time(), verb=verb)
    print(writable(report, sys.stdout))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""List the newest runs, here or on a cluster: ``orchestrator runs --address http://HEAD:8265``.

Exit codes: 0 done, also if there are no runs; 2 wrong arguments, or the directory cannot be read; 4 the connection to
the cluster was lost.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from orchestrator.display.comparison import ComparedRun, CompareError, read_run
from orchestrator.display.plain_text import writable
from orchestrator.display.run_list import plain, run_list
from orchestrator.records.run_dir import END_STATES, STATES_WITHOUT_END, state_of
from orchestrator.records.run_search import RunSearch, progress_of
from orchestrator.run_verbs import run_verb
from orchestrator.verb_options import add_run_search, positive

STATES = (*STATES_WITHOUT_END, *END_STATES)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb with the arguments ``argv`` (default: ``sys.argv[1:]``); returns the exit code."""
    parser = argparse.ArgumentParser(prog="orchestrator runs", description="List the newest runs, the newest first.")
    parser.add_argument("--last", type=positive, default=20, metavar="N", help="number of runs (default: 20)")
    parser.add_argument("--state", choices=STATES, help="only runs in this state; died: without an end and a driver")
    add_run_search(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return run_verb("runs", parser, _list, argv)


def _list(options: argparse.Namespace, search: RunSearch) -> int:
    found = list(itertools.islice(_runs(search, options.state), options.last))
    if options.json:
        print(json.dumps(plain(found), indent=2))
    elif found:
        print(writable(run_list(found, now=time.time()), sys.stdout))
    else:
        print(f"no runs in {search}; start one with `python -m orchestrator.launch`", file=sys.stderr)
    return 0


def _runs(search: RunSearch, state: str | None) -> Iterator[ComparedRun]:
    """The runs in this state, the newest first; an unreadable one is reported and left out."""
    for run_dir in search.runs():
        try:
            name, location = search.name_of(run_dir), run_dir.location
            run = replace(read_run(run_dir.path), state=state_of(run_dir), name=name, location=location)
            if run.state in STATES_WITHOUT_END and state in (None, run.state):
                run = replace(run, summary={**run.summary, **progress_of(run_dir)})
        except (CompareError, OSError, ValueError) as e:
            print(writable(f"warning: {e}", sys.stderr), file=sys.stderr)
            continue
        if state in (None, run.state):
            yield run


if __name__ == "__main__":
    sys.exit(main())

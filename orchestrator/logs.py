"""Show what the ranks of a run have written: ``orchestrator logs <run> --rank 1 --follow``.

Exit codes: 0 done; 2 no such run or rank; 4 the connection to the cluster was lost; 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence

from orchestrator.config.redact import Redactor, masked_output
from orchestrator.display.plain_text import clean, refuse, writable
from orchestrator.records.output_dir import fetch, refresh
from orchestrator.records.rank_log import LogLine, LogReader
from orchestrator.records.run_dir import DIED, WHAT_DIED, RunDir, state_of
from orchestrator.records.run_search import RunSearch
from orchestrator.run_verbs import run_verb
from orchestrator.verb_options import add_run

_POLL_S = 0.5
_POLL_REMOTE_S = 5.0
"""The interval on a store, to which the nodes upload every few seconds."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb with the arguments ``argv`` (default: ``sys.argv[1:]``); returns the exit code."""
    parser = argparse.ArgumentParser(prog="orchestrator logs", description="Show what the ranks of a run have written.")
    add_run(parser)
    parser.add_argument("--rank", type=int, action="append", default=[], metavar="N", help="only this rank; repeatable")
    parser.add_argument("--tail", type=int, metavar="N", help="begin with the last N lines of each rank")
    parser.add_argument("-f", "--follow", action="store_true", help="go on until the run ends, or Ctrl-C")
    with masked_output(Redactor.of_process()):
        return run_verb("logs", parser, _show, argv)


def _show(options: argparse.Namespace, search: RunSearch) -> int:
    run_dir = search.look_up(options.run)
    reader = LogReader(run_dir, options.rank)
    _fetch_logs(run_dir)
    missing = sorted(set(options.rank) - set(reader.ranks()))
    if missing and not options.follow:
        known = ", ".join(map(str, LogReader(run_dir).ranks())) or "none"
        return refuse("logs", f"{run_dir.location}: no log of rank {missing[0]}; there are logs of ranks {known}")
    several = len(options.rank) != 1
    lines = reader.read(complete=False)
    _print(lines if options.tail is None else _last(lines, options.tail), several=several)
    while options.follow and run_dir.driver_if_running() is not None:
        time.sleep(_POLL_S if run_dir.remote is None else _POLL_REMOTE_S)
        run_dir = refresh(run_dir) or run_dir
        reader.move_to(run_dir)
        _fetch_logs(run_dir)
        _print(reader.read(complete=False), several=several)
    _fetch_logs(run_dir)
    _print(reader.read(), several=several)
    if options.follow and state_of(run_dir) == DIED:
        print(f"logs: {run_dir.location}: {WHAT_DIED}", file=sys.stderr)
    if not reader.has_read:
        print(f"logs: the ranks of {run_dir.location} have written nothing", file=sys.stderr)
    return 0


def _fetch_logs(run_dir: RunDir) -> None:
    fetch(run_dir, [run_dir.logs.name])


def _last(lines: Iterable[LogLine], number: int) -> Iterator[LogLine]:
    by_rank: defaultdict[int, deque[LogLine]] = defaultdict(lambda: deque(maxlen=number))
    for line in lines:
        by_rank[line.rank].append(line)
    return itertools.chain.from_iterable(by_rank.values())


def _print(lines: Iterable[LogLine], *, several: bool) -> None:
    for line in lines:
        text = writable(clean(line.text), sys.stdout)
        print(f"rank {line.rank} | {text}" if several else text, flush=True)


if __name__ == "__main__":
    sys.exit(main())

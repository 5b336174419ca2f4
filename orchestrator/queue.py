"""The queue of the runs on a cluster: ``orchestrator queue list | cancel RUN | priority RUN N``.

Exit codes: 0 done; 2 wrong arguments, no such run in the queue, or the cluster cannot be joined.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from orchestrator.exit_codes import BAD_INPUT

if TYPE_CHECKING:
    from orchestrator.driver.queue.queue_control import QueueControl

_DESCRIPTION = """\
List the runs that share a Ray cluster, cancel one, or change its priority. A run waits until it is the first in the
line and its workers fit; one of higher priority goes first, and running runs of lower priority make room for it.
"""
_RUN_HELP = "the name or the id of a run in the queue, its directory or URL, <date>/<time>-<name>, or <time>-<name>"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb with the arguments ``argv`` (default: ``sys.argv[1:]``); returns the exit code."""
    options = _parser().parse_args(argv)
    from orchestrator.config.build import ConfigError
    from orchestrator.driver.queue.queue_control import QueueControl, QueueError

    try:
        with QueueControl(options.address or os.environ.get("RAY_ADDRESS") or "auto") as queue:
            if options.action == "cancel":
                print(f"{queue.cancel(options.run)} is asked to stop; if it trains, it saves a checkpoint first")
            elif options.action == "priority":
                print(f"{queue.set_priority(options.run, options.priority)} has priority {options.priority}")
            else:
                _list(queue)
    except (ConfigError, QueueError) as e:
        print(f"queue: {e}", file=sys.stderr)
        return BAD_INPUT
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="orchestrator queue", description=_DESCRIPTION)
    parser.add_argument("--address", help="host:port of Ray (default: RAY_ADDRESS, or the Ray of this machine)")
    actions = parser.add_subparsers(dest="action", metavar="list | cancel | priority")
    actions.add_parser("list", help="list the runs with workers, and those that wait in their order (default)")
    cancel = actions.add_parser("cancel", help="end a run, as `orchestrator stop` does, also while it waits")
    cancel.add_argument("run", help=_RUN_HELP)
    priority = actions.add_parser("priority", help="change the priority of a run")
    priority.add_argument("run", help=_RUN_HELP)
    priority.add_argument("priority", type=int, help="a whole number; a higher one goes first")
    return parser


def _list(queue: QueueControl) -> None:
    from orchestrator.display.queue_table import order_notes, queue_table
    from orchestrator.display.text import writable

    entries = queue.entries()
    if not entries:
        print("no run is in the queue", file=sys.stderr)
        return
    print(writable(queue_table(entries, now=time.time()), sys.stdout))
    first_in_line = [e for e in entries if e.state in ("waiting", "reserving")][:1]
    for entry in [*first_in_line, *(e for e in entries if e.state == "unfit")]:
        print(writable(f"{entry.name} ({entry.state}): {queue.why_waiting(entry)}", sys.stdout))
    for line in order_notes(entries):
        print(writable(line, sys.stdout))


if __name__ == "__main__":
    sys.exit(main())

"""The queue of the runs on a cluster: ``orchestrator queue list | cancel RUN | priority RUN N``.

Exit codes: 0 done; 2 wrong arguments, no such run in the queue, or the cluster cannot be joined; 4 the connection to
the cluster was lost; 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from orchestrator.display.plain_text import refuse
from orchestrator.run_verbs import run_on_cluster
from orchestrator.storage.remote import is_url
from orchestrator.verb_options import INTERRUPTED

if TYPE_CHECKING:
    from orchestrator.features.queue.control import QueueControl

_DESCRIPTION = """\
List the runs that share a Ray cluster, cancel one, or change its priority. A run waits until it is the first in the
line and its workers fit; one of higher priority goes first, and running runs of lower priority make room for it.
"""
_ADDRESS_HELP = (
    "the cluster: http://HEAD:8265, Ray's dashboard, or on one of its nodes host:port of Ray or auto (default: "
    "RAY_API_SERVER_ADDRESS, RAY_ADDRESS, or the Ray of this machine)"
)
_RUN_HELP = "the name or the id of a run in the queue, its directory or URL, <date>/<time>-<name>, or <time>-<name>"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb with the arguments ``argv`` (default: ``sys.argv[1:]``); returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    options = _parser().parse_args(words)
    address = options.address
    if address is None:
        address = os.environ.get("RAY_API_SERVER_ADDRESS")
    address = address or "auto"
    from orchestrator.config.build import ConfigError
    from orchestrator.features.queue.control import QueueControl, QueueError

    try:
        if is_url(address):
            return run_on_cluster("queue", words, address)
        with QueueControl(address) as queue:
            if options.action == "cancel":
                print(f"{queue.cancel(options.run)} is asked to stop; if it trains, it saves a checkpoint first")
            elif options.action == "priority":
                print(f"{queue.set_priority(options.run, options.priority)} has priority {options.priority}")
            else:
                _list(queue)
    except (ConfigError, QueueError) as e:
        return refuse("queue", e)
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="orchestrator queue", description=_DESCRIPTION)
    parser.add_argument("--address", help=_ADDRESS_HELP)
    # Also after the action. Without a default, which would replace the value before it.
    address = argparse.ArgumentParser(add_help=False)
    address.add_argument("--address", default=argparse.SUPPRESS, help=_ADDRESS_HELP)
    actions = parser.add_subparsers(dest="action", metavar="list | cancel | priority")
    add = functools.partial(actions.add_parser, parents=[address])
    add("list", help="list the runs with workers, and those that wait in their order (default)")
    cancel = add("cancel", help="end a run, as `orchestrator stop` does, also while it waits")
    cancel.add_argument("run", help=_RUN_HELP)
    priority = add("priority", help="change the priority of a run")
    priority.add_argument("run", help=_RUN_HELP)
    priority.add_argument("priority", type=int, help="a whole number; a higher one goes first")
    return parser


def _list(queue: QueueControl) -> None:
    from orchestrator.display.plain_text import writable
    from orchestrator.features.queue.shown import order_notes, queue_table

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

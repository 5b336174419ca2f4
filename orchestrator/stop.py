"""Stop a run from any host that reaches its directory: ``orchestrator stop <run directory>``.

Exit codes: 0 the run has stopped; 1 it is still running, and the request stays; 2 no such run, or it is not running.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from orchestrator.config.options import add_run
from orchestrator.display.text import refuse
from orchestrator.records.output_dir import look_up_run, refresh
from orchestrator.records.run_dir import state_of
from orchestrator.records.stop_request import request_stop

_POLL_S = 0.5
_DEFAULT_WAIT_S = 60.0
_DESCRIPTION = """\
Stop a run as SIGTERM to its driver would: it saves a checkpoint and can be resumed. The driver may be on another host.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb with the arguments ``argv`` (default: ``sys.argv[1:]``); returns the exit code."""
    parser = argparse.ArgumentParser(prog="orchestrator stop", description=_DESCRIPTION)
    add_run(parser)
    parser.add_argument(
        "--wait", type=float, default=_DEFAULT_WAIT_S, metavar="S", help="seconds to wait for the end (default: 60)"
    )
    options = parser.parse_args(argv)
    try:
        run_dir = look_up_run(options.run, options.output_dir)
        if run_dir.driver_if_running() is None:
            return refuse("stop", f"{run_dir.location} is not running: its state is {state_of(run_dir)}")
        request_stop(run_dir)
        deadline = time.monotonic() + options.wait
        while run_dir.driver_if_running() is not None:
            if time.monotonic() >= deadline:
                print(f"{run_dir.location} still runs; it is asked to stop, which takes up to cluster.stop_grace_s")
                return 1
            time.sleep(_POLL_S)
            refresh(run_dir)
        record = run_dir.read_record()
    except (OSError, ValueError) as e:
        return refuse("stop", e)
    print(f"{run_dir.location}: {record.get('reason') or record.get('state')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

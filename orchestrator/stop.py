"""Stop a run from any host: ``orchestrator stop <run>``.

The request is a file in the directory of the run. With ``--address``, a run whose directory this process cannot reach
or write, such as a run of another user or host, is asked through the queue of the cluster.

Exit codes: 0 the run has stopped; 1 it is still running, and the request stays, or its driver has died meanwhile; 2 no
such run, or it is not running; 4 the connection to the cluster was lost.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence

from orchestrator import features
from orchestrator.display.plain_text import refuse
from orchestrator.driver.process.origin import who_asks
from orchestrator.records.output_dir import refresh
from orchestrator.records.run_dir import DIED, WHAT_DIED, RunDir, request_stop, state_of
from orchestrator.records.run_search import NEWEST, NoSuchRunError, RunSearch
from orchestrator.run_verbs import run_verb
from orchestrator.verb_options import add_run

_POLL_S = 0.5
_DEFAULT_WAIT_S = 60.0
_DESCRIPTION = """\
Stop a run as SIGTERM to its driver would: it saves a checkpoint and can be resumed. The driver may be on another host,
and with --address the run may belong to another user.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb with the arguments ``argv`` (default: ``sys.argv[1:]``); returns the exit code."""
    parser = argparse.ArgumentParser(prog="orchestrator stop", description=_DESCRIPTION)
    add_run(parser)
    parser.add_argument(
        "--wait", type=float, default=_DEFAULT_WAIT_S, metavar="S", help="seconds to wait for the end (default: 60)"
    )
    return run_verb("stop", parser, _stop, argv)


def _stop(options: argparse.Namespace, search: RunSearch) -> int:
    if options.address and options.run == NEWEST:
        return refuse("stop", "the newest run on a cluster may be another person's; name it, as `runs` does")
    try:
        return _stop_by_file(_meant(options.run, search), options.wait)
    except (NoSuchRunError, PermissionError) as e:
        if not options.address:
            raise
        return _stop_by_queue(options, e)


def _meant(text: str, search: RunSearch) -> RunDir:
    """Return the run to stop: of several of one name, the one that is running.

    Raises:
        NoSuchRunError: there is no such run.
        ValueError: several are running.
    """
    named = () if text == NEWEST else search.named(text)
    running = [run_dir for run_dir in named if run_dir.driver_if_running() is not None]
    if len(running) > 1:
        listed = ", ".join(run_dir.location for run_dir in running)
        raise ValueError(f"{text}: several runs of this name are running; give the directory of one: {listed}")
    return running[0] if running else search.look_up(text)


def _stop_by_file(run_dir: RunDir, wait_s: float) -> int:
    if run_dir.driver_if_running() is None:
        return refuse("stop", f"{run_dir.location} is not running; its state: {state_of(run_dir)}")
    request_stop(run_dir, by=who_asks())

    def is_running() -> bool:
        nonlocal run_dir
        run_dir = refresh(run_dir) or run_dir
        return run_dir.driver_if_running() is not None

    if _lasts(is_running, wait_s):
        return _still_runs(run_dir.location)
    if (state := state_of(run_dir)) == DIED:
        print(f"{run_dir.location}: {WHAT_DIED}")
        return 1
    print(f"{run_dir.location}: {run_dir.read_record().get('reason') or state}")
    return 0


def _stop_by_queue(options: argparse.Namespace, unreachable: Exception) -> int:
    """Cancel the run in the queue of the cluster; ``unreachable`` says why its directory cannot be used."""
    control = next(features.modules("control"), None)
    if control is None:
        return refuse("stop", unreachable)
    try:
        with control.QueueControl(options.address) as queue:
            if not queue.has(options.run):
                return refuse("stop", f"{unreachable}; nor is it in the queue of the cluster")
            name = queue.cancel(options.run)
            if _lasts(lambda: queue.has(options.run), options.wait):
                return _still_runs(name)
    except control.QueueError as e:
        return refuse("stop", e)
    print(f"{name}: stopped through the queue of the cluster")
    return 0


def _lasts(is_running: Callable[[], bool], wait_s: float) -> bool:
    """Wait until the run has ended; returns whether it still runs after ``wait_s`` seconds."""
    deadline = time.monotonic() + wait_s
    while is_running():
        if time.monotonic() >= deadline:
            return True
        time.sleep(_POLL_S)
    return False


def _still_runs(run: str) -> int:
    print(f"{run} still runs; it is asked to stop, which takes up to cluster.stop_grace_s")
    return 1


if __name__ == "__main__":
    sys.exit(main())

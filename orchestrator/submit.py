"""Submit a launch to a Ray cluster: ``orchestrator submit strategy=ddp``, then follow its output.

Exit codes: 0 submitted, with ``--no-wait``; otherwise that of the run, as ``orchestrator launch`` returns it; 2 the
configuration is wrong or the cluster refuses the job, and nothing was started; 4 the connection was lost, and the job
may be running; 130 Ctrl-C, and the job goes on.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from orchestrator.config.build import ConfigError
from orchestrator.config.redact import Redactor, masked_output
from orchestrator.launch import BAD_INPUT, RESTARTS_OPTION

CONNECTION_LOST = 4
"""Exit code if the job can no longer be followed."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb with the arguments ``argv`` (default: ``sys.argv[1:]``); returns the exit code."""
    options = _parser().parse_intermixed_args(argv)
    redactor = Redactor.of_process()
    with masked_output(redactor):
        try:
            return _follow(options.attach, options.address) if options.attach else _submit(options, redactor)
        except ConfigError as e:
            from orchestrator.display.report import errors_text

            print(errors_text(e.errors), file=sys.stderr)
            return BAD_INPUT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="orchestrator submit",
        description="Submit a launch to a Ray cluster as a job, and follow its output.",
        epilog="The code in the working directory travels to the cluster, without the files that .rayignore names. "
        "Ctrl-C ends the following, not the job.",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for `orchestrator launch`")
    parser.add_argument("-m", "--multirun", action="store_true", help="run a sweep, as for `orchestrator launch`")
    parser.add_argument(
        "--address",
        help="URL of Ray's dashboard (default: RAY_API_SERVER_ADDRESS, or http://127.0.0.1:8265)",
    )
    parser.add_argument("--working-dir", type=Path, default=Path(), help="the directory that travels (default: .)")
    parser.add_argument("--restarts", type=int, metavar="N", help="as for `orchestrator launch`")
    parser.add_argument("--no-wait", action="store_true", help="do not follow the output")
    parser.add_argument("--attach", metavar="ID", help="submit nothing; follow the job with this submission id")
    return parser


def _submit(options: argparse.Namespace, redactor: Redactor) -> int:
    from orchestrator.driver import job_submission
    from orchestrator.driver.preflight.submitted import checked, visible_secrets
    from orchestrator.records.git import git_facts

    address = _address(options.address)
    working_dir = options.working_dir.resolve()
    configs = checked(options.overrides, working_dir, redactor, sweep=options.multirun)
    if secrets := visible_secrets(options.overrides):
        print(
            f"warning: Ray's dashboard shows the command of a job, with {', '.join(secrets)}; set an environment "
            "variable on the cluster instead, and pass '<key>=${oc.env:NAME}'",
            file=sys.stderr,
        )
    source = git_facts(working_dir)
    submission = job_submission.make_submission(
        configs,
        [*_launch_options(options), *options.overrides],
        working_dir=working_dir,
        source=source,
        suffix=f"{datetime.now():%m%d-%H%M%S}-{os.urandom(2).hex()}",
        redactor=redactor,
    )
    job_submission.JobServer(address).submit(submission)
    print(f"submitted {submission.id} to {address}")
    print(f"  follow   orchestrator submit --attach {submission.id}{_option(options.address)}")
    print(f"  stop     ray job stop {submission.id}{_option(options.address)}", flush=True)
    return 0 if options.no_wait else _follow(submission.id, options.address)


def _launch_options(options: argparse.Namespace) -> list[str]:
    if options.multirun:
        return ["-m"]
    return [] if options.restarts is None else [f"{RESTARTS_OPTION}={options.restarts}"]


def _follow(submission_id: str, given_address: str | None) -> int:
    from orchestrator.driver.job_submission import JobServer

    try:
        return JobServer(_address(given_address)).follow(submission_id, sys.stdout)
    except KeyboardInterrupt:
        print(f"\nthe job goes on; stop it with: ray job stop {submission_id}{_option(given_address)}", file=sys.stderr)
        return 130
    except ConnectionError as e:
        again = f"orchestrator submit --attach {submission_id}{_option(given_address)}"
        print(f"the connection was lost ({e}); the job may be running: {again}", file=sys.stderr)
        return CONNECTION_LOST


def _address(given: str | None) -> str:
    from orchestrator.driver.job_submission import DEFAULT_ADDRESS

    return given or os.environ.get("RAY_API_SERVER_ADDRESS") or DEFAULT_ADDRESS


def _option(given_address: str | None) -> str:
    return f" --address {given_address}" if given_address else ""


if __name__ == "__main__":
    sys.exit(main())

"""Submit a launch to a Ray cluster: ``orchestrator submit strategy=ddp``, then follow its output.

Exit codes: 0 submitted, with ``--no-wait``; otherwise the code of the run, as ``orchestrator launch`` returns it; 2 the
configuration is wrong or the cluster refuses the job, and nothing was started; 4 the connection was lost, and the job
may be running; 130 Ctrl-C, and the job goes on.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, cast

from orchestrator.config.build import ConfigError
from orchestrator.config.overrides import last_of_each, masked
from orchestrator.config.redact import MASK, Redactor
from orchestrator.display.plain_text import say_note
from orchestrator.display.terminal import closing_interrupts
from orchestrator.driver.preflight.early_checks import refuse_early
from orchestrator.features.submit.marked_output import JobLog
from orchestrator.launch import RESTARTS_OPTION
from orchestrator.verb_options import CONNECTION_LOST, INTERRUPTED, add_files, file_words
from orchestrator.verb_outcome import outcome

if TYPE_CHECKING:
    from orchestrator.driver.process.origin import Origin
    from orchestrator.features.submit.job_submission import JobServer


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb with the arguments ``argv`` (default: ``sys.argv[1:]``); returns the exit code."""
    options = _parser().parse_intermixed_args(argv)
    options.overrides = [*file_words(options), *options.overrides]
    redactor = Redactor.of_process()
    with closing_interrupts():
        return outcome(
            "submit", lambda: _attach(options) if options.attach else _try_submit(options, redactor), redactor
        )


def _attach(options: argparse.Namespace) -> int:
    from orchestrator.features.submit.job_submission import JobServer

    return _follow(JobServer(options.address), options.attach)


def _try_submit(options: argparse.Namespace, redactor: Redactor) -> int:
    try:
        return _submit(options, redactor)
    except KeyboardInterrupt:
        print("\nnothing was submitted", file=sys.stderr)
        raise


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="orchestrator submit",
        description="Submit a launch to a Ray cluster as a job, and follow its output.",
        epilog="The code in the working directory travels to the cluster, without the files that .rayignore names. "
        "Ctrl-C ends the following, not the job.",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for `orchestrator launch`")
    add_files(parser)
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
    options.overrides = last_of_each(options.overrides, say_note)
    if not options.multirun and options.working_dir.resolve() == Path.cwd():
        refuse_early([options.overrides], redactor, starts_here=False)
    # Imported here because errors in keys must not wait seconds for torch and Ray.
    from orchestrator.driver.preflight.run_config import base_dir
    from orchestrator.driver.process.origin import origin_of_submission
    from orchestrator.driver.process.uploads import tracking_keys
    from orchestrator.features.submit.job_submission import JobServer, make_submission
    from orchestrator.features.submit.submitted import checked, visible_secrets
    from orchestrator.records.git import git_facts

    if options.multirun and options.restarts is not None:
        raise ConfigError([f"{RESTARTS_OPTION}={options.restarts}: only for a single run, without -m"])
    working_dir = options.working_dir.resolve()
    configs = checked(options.overrides, working_dir, redactor, sweep=options.multirun)
    if secrets := visible_secrets(options.overrides):
        print(
            f"warning: Ray's dashboard shows the command of a job, with {', '.join(secrets)}; set an environment "
            "variable on the cluster instead, and pass '<key>=${oc.env:NAME}'",
            file=sys.stderr,
        )
    found = tracking_keys().variables(configs[0].tracking, base_dir())
    variables = {name: value for name, value in found.items() if MASK not in value}
    for name in found.keys() - variables.keys():
        print(
            f"warning: {name} does not travel, because Ray's dashboard would show its password; set it on the "
            "cluster, or the login in ~/.mlflow/credentials there",
            file=sys.stderr,
        )
    server = JobServer(options.address)
    origin = origin_of_submission(
        options.overrides,
        given_address=server.given_address,
        address=server.address,
        working_dir=str(options.working_dir),
        restarts=options.restarts,
        ray=server.ray_command,
    )
    submission = make_submission(
        configs,
        [*_launch_options(options), *options.overrides],
        working_dir=working_dir,
        source=git_facts(working_dir),
        suffix=f"{datetime.now():%m%d-%H%M%S}-{os.urandom(2).hex()}",
        origin=origin,
        redactor=redactor,
        variables=variables,
    )
    try:
        server.submit(submission)
    except KeyboardInterrupt:
        stop = server.command_to_stop(submission.id)
        print(f"\ninterrupted while the job was sent; if it has arrived, it runs: {stop}", file=sys.stderr)
        return INTERRUPTED
    print(f"submitted {submission.id} to {server.address}")
    shown = [masked(word, redactor) for word in options.overrides]
    words = ["-m", *shown] if options.multirun else shown
    for purpose, command in _next_commands(server, submission.id, origin, words, is_sweep=options.multirun):
        print(f"  {purpose:<8} {command}", flush=True)
    return 0 if options.no_wait else _follow(server, submission.id)


def _launch_options(options: argparse.Namespace) -> list[str]:
    if options.multirun:
        return ["-m"]
    return [f"{RESTARTS_OPTION}={options.restarts or 0}"]  # with 0, for the last lines of a job whose driver dies


def _next_commands(
    server: JobServer, submission_id: str, origin: Origin, words: Sequence[str], *, is_sweep: bool
) -> Iterator[tuple[str, str]]:
    """Yield what the user may type next, and what for."""
    yield "follow", server.command_to_follow(submission_id)
    yield "stop", server.command_to_stop(submission_id)
    yield "resume", shlex.join(origin.relaunch(resuming(words)))
    if is_sweep:
        yield "logs", f"{origin.verb('logs', 'RUN', '--follow')}  (RUN: a run directory that the job prints)"
    else:
        yield "logs", origin.verb("logs", submission_id, "--follow")
    yield "queue", origin.verb("queue", "list")


def resuming(words: Sequence[str]) -> list[str]:
    """Return the overrides with ``resume=auto``, unless they name a run to resume."""
    kept = [w for w in words if w != "resume=never"]
    return kept if any(w.startswith("resume=") for w in kept) else [*kept, "resume=auto"]


def _follow(server: JobServer, submission_id: str) -> int:
    log = JobLog()
    try:
        exit_code = server.follow(submission_id, cast(TextIO, log))
        log.end()
        return exit_code
    except KeyboardInterrupt:
        print(f"\nthe job goes on; stop it with: {server.command_to_stop(submission_id)}", file=sys.stderr)
        return INTERRUPTED
    except ConnectionError as e:
        again = server.command_to_follow(submission_id)
        print(f"the connection was lost ({e}); the job may be running: {again}", file=sys.stderr)
        return CONNECTION_LOST


if __name__ == "__main__":
    sys.exit(main())

"""Upload to MLflow what it lacks of a run: ``orchestrator sync <run directory> [--uri URI]``.

Exit codes: 0 everything is uploaded; 1 the server cannot be reached, or the model is missing; 2 wrong arguments.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from orchestrator.config.redact import redact_text
from orchestrator.display.plain_text import refuse
from orchestrator.display.terminal import still_working
from orchestrator.features.tracking.exports import missing_exports, upload_exports
from orchestrator.features.tracking.mlflow import MlflowBackend
from orchestrator.features.tracking.transfer import Transfer, count_points
from orchestrator.features.tracking.uri import absolute_uri, is_redacted, redact_uri, validate_uri
from orchestrator.records.ended_runs import exclusive, final_ending, mark_killed
from orchestrator.records.journal import Ending
from orchestrator.records.output_dir import fetch, push_records
from orchestrator.records.run_dir import RunDir
from orchestrator.records.run_search import RunSearch
from orchestrator.storage.remote import StorageError

_DEFAULT_REQUEST_TIMEOUT_S = 10.0
_DESCRIPTION = """\
Upload to MLflow what it lacks of a run: points, final status, artifacts, the final model. It may be repeated;
no point is stored twice.
"""
_EXIT_CODES = """\
Exit codes: 0 everything is uploaded; 1 the server cannot be reached, or the model is missing; 2 wrong arguments.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb with the arguments ``argv`` (default: ``sys.argv[1:]``); returns the exit code."""
    parser = argparse.ArgumentParser(prog="orchestrator sync", description=_DESCRIPTION, epilog=_EXIT_CODES)
    parser.add_argument("run", help="the name of a run, its directory, its URL, or `last`")
    parser.add_argument("--uri", help="MLflow tracking URI (default: the tracking.uri of the run)")
    args = parser.parse_args(argv)

    try:
        run_dir = RunSearch.of(None).look_up(args.run)
        fetch(run_dir)
        record = run_dir.read_record()
    except (OSError, ValueError) as e:
        return refuse("sync", e)
    tracking = record.get("tracking") or {}
    uri = args.uri or tracking.get("uri")
    if uri is None:
        return refuse("sync", "this run was not tracked; pass a tracking URI, such as --uri sqlite:///mlflow.db")
    if is_redacted(uri):
        return refuse("sync", f"the password in {uri} is not stored; pass the full URI with --uri")
    if error := validate_uri(uri):
        return refuse("sync", error)

    request_timeout_s = tracking.get("request_timeout_s", _DEFAULT_REQUEST_TIMEOUT_S)
    backend = MlflowBackend(absolute_uri(uri, Path.cwd()), request_timeout_s=request_timeout_s)
    with exclusive(run_dir, timeout_s=request_timeout_s) as acquired:
        if not acquired:
            return refuse("sync", "this run is still being uploaded by its own process; try again later")
        driver_alive = run_dir.driver_if_running() is not None
        if driver_alive and run_dir.remote is not None:
            return refuse("sync", f"{run_dir.location} still runs, and its driver uploads it; try again at its end")
        mark_killed(run_dir, reason="the driver process died without reporting an end")
        exit_code = _upload(Transfer(run_dir, backend), run_dir, given_uri=args.uri, driver_alive=driver_alive)
        try:
            push_records(run_dir)
        except StorageError as e:
            print(f"the progress of this upload is not stored: {e}", file=sys.stderr)
            return 1
    ending = final_ending(run_dir)
    if exit_code == 0 and ending is not None:
        wanted = {key: tracking.get(key, False) for key in ("log_model", "log_dataset")}
        if exports := missing_exports(run_dir, ending, **wanted):
            exit_code = _upload_exports(exports, run_dir, backend, ending)
    return exit_code


def _upload_exports(exports: Sequence[str], run_dir: RunDir, backend: MlflowBackend, ending: Ending) -> int:
    """Upload the model and the dataset of a run that has finished; returns the exit code."""
    try:
        upload_exports(exports, run_dir, backend, ending)
    except Exception as e:  # of any type: the job's code, MLflow, database drivers, HTTP
        print(f"{' and '.join(exports)}: not uploaded: {type(e).__name__}: {redact_text(str(e))}", file=sys.stderr)
        return 1
    return 0


def _upload(transfer: Transfer, run_dir: RunDir, *, given_uri: str | None, driver_alive: bool) -> int:
    server = transfer.cursor.uri
    before = transfer.cursor
    try:
        with still_working(lambda: f"sync: {transfer.cursor.points} points are on {server}"):
            transfer.push(None if driver_alive else final_ending(run_dir))
    except Exception:  # of any type: MLflow, database drivers, HTTP; the cursor has the text
        missing = count_points(run_dir, offset=transfer.cursor.offset)
        uri = ["--uri", redact_uri(given_uri)] if given_uri else []
        again = shlex.join(["orchestrator", "sync", run_dir.location, *uri])
        print(f"{server}: {transfer.cursor.error}", file=sys.stderr)
        print(f"{missing} points are not uploaded, and none is lost; try again with: {again}", file=sys.stderr)
        return 1
    cursor = transfer.cursor
    with contextlib.suppress(OSError):  # a full disk: the upload is complete
        run_dir.record_upload(cursor.run_id)
    start = before.points if before.run_id == cursor.run_id else 0
    print(f"uploaded {cursor.points - start} points; all {cursor.points} are on {server}")
    if driver_alive:
        print("the run is still training; sync it again when it has ended")
    return 0


if __name__ == "__main__":
    sys.exit(main())

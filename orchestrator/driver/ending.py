"""The end of a run: its records, its upload to MLflow and the verdict on the console."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal

from orchestrator import features
from orchestrator.config.operation import TrackingConfig
from orchestrator.config.redact import Redactor
from orchestrator.display.limits import what_limited
from orchestrator.display.plain_text import first_line
from orchestrator.display.rate_finder import draw, find
from orchestrator.display.run_end import describe_run, run_page
from orchestrator.driver.process.origin import Origin
from orchestrator.driver.process.run_context import EventStream, RunResult
from orchestrator.driver.process.uploads import Upload, Uploader, tracking_keys
from orchestrator.driver.reporting import RecordUpload
from orchestrator.planning.plan import Plan
from orchestrator.policy.run_state import RESULT_LOST
from orchestrator.protocol.events import RunEnded, SampleSaved, Warned
from orchestrator.protocol.metrics import to_record
from orchestrator.records.journal import Journal, read_metrics
from orchestrator.records.json_file import write_json
from orchestrator.records.output_dir import OutputDir
from orchestrator.records.run_dir import RunDir
from orchestrator.records.run_search import search_options
from orchestrator.state.checkpoint_store import CheckpointStore
from orchestrator.timeline import trace

_NEWEST_RUNS = 20
PROMPT_WAIT_S = 0.5
"""Enough for an upload that needs nothing but the end of a run. One that has yet to import MLflow takes seconds."""


@dataclass(frozen=True, kw_only=True)
class RunEnding:
    """Writes down how a run ended.

    Attributes:
        resume_command: the command that continues the run.
        in_sweep: whether a comparison of the whole sweep follows.
        owns_process: whether the command line has begun the run, and not a program that wants its result.
        origin: how other commands begin.
        finds_rate: whether the run looks for a learning rate.
    """

    plan: Plan
    run_dir: RunDir
    tracking: TrackingConfig
    uploader: Uploader
    records: RecordUpload
    journal: Journal
    events: EventStream
    redactor: Redactor
    resume_command: str
    in_sweep: bool
    owns_process: bool
    origin: Origin
    finds_rate: bool = False

    def finish(self, result: RunResult) -> RunResult:
        """Record ``result``, wait for the upload unless the run was stopped, and show the verdict last.

        Returns:
            ``result`` with the complete summary, and with secrets masked.
        """
        run_dir = self.run_dir
        redactor = self.redactor
        reason, summary = redactor.text(result.reason), redactor.data(result.summary, by_key=False)
        result = replace(result, reason=reason, summary=summary)
        run_dir.release_space()
        self._mask_logs()
        self._record(
            state=result.status.lower(),
            reason=result.reason,
            ended=time.time(),
            summary=dict(result.summary),
            metrics=redactor.data([to_record(spec) for spec in result.metrics], by_key=False),
        )
        summary = {**result.summary, **self._write_timeline(result), **self._limit(result)}
        if self.finds_rate:
            summary |= self._suggested_rate(int(summary.get("steps") or 0))
        if run_dir.profile.is_dir():
            summary["profile"] = run_dir.location_of(run_dir.profile)
        if run_dir.samples.is_dir():
            summary["samples"] = run_dir.location_of(run_dir.samples)
        self._describe(result, summary)
        ended = RunEnded(status=result.status, exit_code=result.exit_code, reason=result.reason, summary=summary)
        self.events.record(ended)
        stopped = result.status == "KILLED"
        upload = self.uploader.leave() if stopped else self.uploader.finish(timeout_s=self._upload_wait_s)
        if (problem := self.uploader.sink_problem()) is not None:
            self.events.show(Warned(message=f"not complete: tracking.sinks ({problem})"))
        if upload.page is not None:
            summary["mlflow_page"] = upload.page
            if upload.run_id is not None:
                summary["mlflow_run_page"] = run_page(upload.page, upload.run_id)
        known = {} if upload.run_id is None else {"mlflow_run_id": upload.run_id}  # the follower may have recorded it
        self._record(summary={**summary, **known}, **known)
        summary["mlflow_run_id"] = upload.run_id
        if is_missed := not stopped and not upload.complete:
            summary["mlflow_missing"] = _missing(upload)
        needs_sync = is_missed and not (upload.in_progress and upload.error is None)
        commands = self._next_commands(result, needs_sync=needs_sync)
        result = self._upload_records(replace(result, summary=summary))
        self.events.show(replace(ended, exit_code=result.exit_code, summary=summary, next_commands=commands))
        return result

    @property
    def _upload_wait_s(self) -> float:
        """The time for the rest of the upload: short before a prompt.

        The next run of a sweep or of a program would train beside the upload.
        """
        wait_s = self.tracking.flush_timeout_s
        prompts = self.owns_process and sys.stdout.isatty() and not self.in_sweep
        return min(wait_s, PROMPT_WAIT_S) if prompts else wait_s

    def abort(self, status: Literal["FAILED", "KILLED"], exit_code: int, reason: str) -> None:
        """Record the end of a run that has no result."""
        self.finish(self._without_result(status, exit_code, reason))

    def leave(self, reason: str) -> RunResult:
        """Show that the run directory belongs to another driver now, and write nothing more to it."""
        self.journal.discard()
        self.uploader.leave()
        self.events.show(RunEnded(status="FAILED", exit_code=1, reason=reason, summary={}))
        return self._without_result("FAILED", 1, reason)

    def _without_result(self, status: Literal["FAILED", "KILLED"], exit_code: int, reason: str) -> RunResult:
        run_dir = self.run_dir
        return RunResult(status=status, exit_code=exit_code, reason=reason, run_dir=run_dir.path, url=run_dir.url)

    def _describe(self, result: RunResult, summary: Mapping[str, Any]) -> None:
        """Record the end of the run in words, for MLflow."""
        with contextlib.suppress(OSError, ValueError):  # a damaged record has been reported
            record = self.run_dir.read_record()
            paragraphs = [
                describe_run(record, summary, status=result.status, reason=result.reason),
                *(found.in_words(self.run_dir) for found in features.modules("run_words")),
            ]
            self.run_dir.update_record(description="\n\n".join(filter(None, paragraphs)))

    def _upload_records(self, result: RunResult) -> RunResult:
        """Upload what is left of the records; without it, a run that has finished has the exit code of a loss."""
        problem = self.records.finish()
        if problem is None:
            return result
        self.events.show(Warned(message=problem))
        return replace(result, exit_code=result.exit_code or RESULT_LOST, reason=result.reason or problem)

    def _mask_logs(self) -> None:
        """Mask secrets in the logs: what C code and child processes write passes no stream of a worker."""
        for log in self.run_dir.logs.glob("[!.]*"):
            masked = log.with_name(f".{log.name}.masked")
            with contextlib.suppress(OSError):  # a full disk: the upload masks what it sends
                if self.redactor.copy_file(log, masked):
                    masked.replace(log)
            with contextlib.suppress(OSError):
                masked.unlink(missing_ok=True)

    def _record(self, **values: Any) -> None:
        """Set keys of ``run.json``. A disk that cannot be written does not change how the run ended."""
        try:
            self.run_dir.update_record(**values)
        except (OSError, ValueError) as e:
            text = f"cannot write {self.run_dir.record_file} ({e}): it does not say how the run ended"
            self.events.show(Warned(message=text))

    def _write_timeline(self, result: RunResult) -> dict[str, str]:
        """Write the trace of the pipeline stages, if there is one; returns where it is, for the summary."""
        if result.timeline is None:
            return {}
        file = self.run_dir.timeline_trace
        try:
            write_json(file, trace(result.timeline))
        except OSError as e:  # a missing trace is no reason to fail a run
            self.events.show(Warned(message=f"no timeline was written: {e}"))
            return {}
        return {"timeline": self.run_dir.location_of(file)}

    def _limit(self, result: RunResult) -> dict[str, str]:
        """What limited the speed of the run, for the summary."""
        try:
            text = what_limited(result.summary, self.run_dir.read_record())
        except Exception as e:  # missing advice is no reason to fail a run
            self.events.show(Warned(message=f"what limited the speed is unknown: {type(e).__name__}: {e}"))
            return {}
        return {} if text is None else {"limit": text}

    def _suggested_rate(self, step: int) -> dict[str, float]:
        """Draw the losses by learning rate as a sample of the run, and say which rate they suggest, for the summary."""
        if (found := find(read_metrics(self.run_dir))) is None:
            self.events.warn("too few losses to suggest a learning rate: raise train.steps, with train.log_every=1")
            return {}
        file = self.run_dir.sample_file(step, "learning_rate", "png")
        try:
            file.parent.mkdir(exist_ok=True)
            draw(found, file)
        except OSError as e:
            self.events.warn(f"the picture of the losses cannot be written: {e}")
        else:
            path = str(file.relative_to(self.run_dir.path))
            self.events.emit(SampleSaved(step=step, name="learning_rate", path=path))
        where = f"losses by learning rate: {self.run_dir.location_of(file)}"
        if found.suggested is None:
            self.events.warn(f"the loss never falls between these rates; {where}")
            return {}
        self.events.note(f"suggested learning rate: {found.suggested:.2g}, where the loss falls fastest; {where}")
        return {"suggested_lr": found.suggested}

    def _has_checkpoint(self) -> bool:
        try:
            return bool(CheckpointStore(self.run_dir.checkpoints, self.run_dir.remote_checkpoints).list())
        except OSError:  # a store that does not answer may have one
            return True

    def _next_commands(self, result: RunResult, *, needs_sync: bool) -> tuple[str, ...]:
        is_over = result.status in ("FINISHED", "PRUNED")
        commands = [self.resume_command] if not is_over and self._has_checkpoint() else []
        if needs_sync:
            commands.append(self.origin.verb("sync", self.run_dir.location))
        keys = tracking_keys()
        commands += keys.sync_commands(self.run_dir)
        if self.in_sweep:
            return tuple(commands)
        output = OutputDir.containing(self.run_dir)
        if features.paths("verbs/compare.py") and (is_over or (result.summary.get("steps") and _may_compare(output))):
            commands.append(compare_command(self.origin, output))
        commands += keys.page_commands(self.tracking, self.origin)
        return (*commands, *keys.event_file_commands(self.run_dir, self.origin))


def _may_compare(output: OutputDir) -> bool:
    """Return whether two of the newest runs have finished; a store is not asked, which may be slow."""
    if output.remote is not None:
        return False
    finished = 0
    for run_dir in islice(output.runs(), _NEWEST_RUNS):
        with contextlib.suppress(OSError, ValueError):  # an unreadable run is left alone
            finished += run_dir.read_record().get("state") == "finished"
    return finished > 1


def _missing(upload: Upload) -> str:
    """Why MLflow lacks something of a run, and who uploads it."""
    if not upload.in_progress:
        return upload.error or "the upload process died"
    goes_on = "the upload goes on in the background"
    return goes_on if upload.error is None else f"{first_line(upload.error)}; {goes_on}"


def compare_command(origin: Origin, output_dir: OutputDir) -> str:
    """Return the command that compares the newest runs in ``output_dir``."""
    no_picture = ["--no-picture"] if origin.remote else []  # it would stay on the machine of the driver
    return origin.verb("compare", "--last", "5", *search_options(output_dir), *no_picture)

"""What one run was, how it went, where its files are, and which commands may follow. From its directory alone."""

from __future__ import annotations

import functools
import posixpath
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrator import features
from orchestrator.config.eval_splits import VAL, metric_prefix
from orchestrator.config.text import path_override
from orchestrator.display.plain_text import count, duration, first_line, number, rate, size
from orchestrator.display.run_end import RunEnd, run_end, run_page
from orchestrator.protocol.events import at_step
from orchestrator.protocol.metrics import summary_value
from orchestrator.records.journal import read_lines
from orchestrator.records.json_file import read_json
from orchestrator.records.output_dir import OutputDir
from orchestrator.records.run_dir import ACTIVE_STATES, STATES_WITHOUT_END, RunDir
from orchestrator.records.run_search import progress_of, search_options

_PYTHON_CALL = "orchestrator.run("
"""The beginning of the command of a run that a program has started."""
_WIDTH_OF_NAMES = 12
_SCRIPT = "script"
"""The strategy that runs a script of the user."""


def run_report(run_dir: RunDir, record: Mapping[str, Any], *, state: str, now: float, verb: Callable[..., str]) -> str:
    """Return the report.

    Args:
        run_dir: the directory of the run.
        record: the contents of its ``run.json``.
        state: see :data:`~orchestrator.protocol.events.RunState`, or ``died``: not ended, and without a driver.
        now: seconds since the epoch.
        verb: returns the command line of a verb, of which it receives the name and the arguments.
    """
    summary: Mapping[str, Any] = record.get("summary") or {}
    if state in STATES_WITHOUT_END:
        summary = {**summary, **progress_of(run_dir)}
    events = [event for event, _ in read_lines(run_dir.events_file)]
    end = _end(record, summary, events)
    checkpoint = next((event for event in reversed(events) if event.get("event") == "checkpoint_saved"), None)
    runs_script = record.get("strategy") == _SCRIPT
    place = functools.partial(_place, run_dir, _kept(run_dir) if checkpoint is not None else None)
    has_saved = checkpoint is not None or (runs_script and _has_files(run_dir.script_checkpoints))
    sections: dict[str, Iterable[str]] = {
        "run": [str(record.get("name", run_dir.path.name))],
        "script": _script(record),
        "state": [_state(record, state, now, end.took_s), *([end.reason] if end.reason else [])],
        "plan": _plan(record, runs_script=runs_script),
        "command": [str(command)] if (command := record.get("command")) else [],
        "result": _result(end, told_steps=not runs_script),
        "speed": _speed(end, began="the script began" if runs_script else "first step"),
        "healing": _healing(events, summary, besides=end.reason),
        "checkpoint": [] if checkpoint is None else [_checkpoint(checkpoint, place)],
        "best": _best(record.get("best"), events, place),
        "files": [run_dir.location, *_files(run_dir)],
        "MLflow": _tracking(run_dir, record),
        "next": _next_commands(
            run_dir, record, verb, resumable=has_saved and state not in ("finished", *ACTIVE_STATES)
        ),
    }
    lines = []
    for name, texts in sections.items():
        lines += [f"{'' if i else name:<{_WIDTH_OF_NAMES}}{text}" for i, text in enumerate(texts)]
    return "\n".join(lines)


def _end(record: Mapping[str, Any], summary: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> RunEnd:
    borders = [event for event in events if event.get("event") in ("run_started", "run_ended")]
    splits = (record.get("params") or {}).get("train.eval_splits") or (VAL,)
    return run_end(
        summary,
        reason=str(borders[-1].get("reason") or "") if borders else "",
        started=record.get("started"),
        ended=record.get("ended"),
        evaluated=[metric_prefix(str(split)).replace("/", "_") for split in splits],
    )


def _state(record: Mapping[str, Any], state: str, now: float, took_s: float | None) -> str:
    started, ended = record.get("started"), record.get("ended")
    if not isinstance(started, (int, float)):
        return state
    if state in STATES_WITHOUT_END or took_s is None:
        return f"{state}, started {duration(max(0.0, now - started), whole=True)} ago"
    return f"{state} after {duration(took_s)}, {duration(max(0.0, now - float(ended or now)), whole=True)} ago"


def _script(record: Mapping[str, Any]) -> Iterator[str]:
    """The script of the user, with its arguments."""
    params = record.get("params")
    if isinstance(params, Mapping) and record.get("strategy") == _SCRIPT and (script := params.get("job.script")):
        yield f"{script} {params.get('job.args') or ''}".rstrip()


def _has_files(directory: Path) -> bool:
    return directory.is_dir() and any(directory.iterdir())


def _plan(record: Mapping[str, Any], *, runs_script: bool) -> Iterator[str]:
    plan = record.get("plan")
    if not isinstance(plan, Mapping):
        return
    steps, samples = (int(plan.get(key, 0)) for key in ("steps", "global_batch_size"))
    request = f"strategy {plan.get('strategy')}, job {plan.get('job')}"
    for key, verb in (("evaluated", "evaluates"), ("started_from", "continues from")):
        if isinstance(source := record.get(key), Mapping):
            yield f"{verb} the checkpoint of step {source.get('step')} of {source.get('run')}"
    if not runs_script:
        yield request + (f", {count(steps, 'step')} of {count(samples, 'sample')}" if steps else "")
    yield f"{count(int(plan.get('world_size', 1)), 'worker')} on {plan.get('device')}"
    if isinstance(pipeline := plan.get("pipeline"), Mapping):
        pieces = count(int(pipeline.get("num_microbatches", 1)), "micro-batch", "es")
        yield f"{count(int(pipeline.get('num_stages', 1)), 'stage')}, {pipeline.get('schedule')}, {pieces}"
    for note in plan.get("notes") or ():
        yield f"note: {note}"


def _result(end: RunEnd, *, told_steps: bool) -> Iterator[str]:
    """The steps and the last values; ``told_steps``: whether 0 steps mean that there were none."""
    values = [f"{key.replace('_', ' ')} {number(value)}" for key, value in end.results.items()]
    if texts := [*([count(end.steps, "step")] if end.steps or (told_steps and end.steps == 0) else []), *values]:
        yield ", ".join(texts)


def _speed(end: RunEnd, *, began: str) -> Iterator[str]:
    if end.samples_per_s is not None:
        yield f"{rate(end.samples_per_s)} samples/s" + (
            "" if end.step_ms is None else f", {end.step_ms:.1f} ms per step"
        )
    if end.warning:
        yield end.warning
    if end.startup_s is not None:
        yield f"{began} after {duration(end.startup_s)}"
    if end.advice:
        yield end.advice


def _healing(events: Sequence[Mapping[str, Any]], summary: Mapping[str, Any], *, besides: str) -> Iterator[str]:
    """The failures of the run and the recoveries, without the failure ``besides`` that has ended it."""
    for event in events:
        match event.get("event"):
            case "worker_lost" | "worker_failed":
                reason = first_line(str(event.get("reason")))
                if event.get("event") == "worker_failed" and reason in besides:
                    continue
                yield f"{event.get('display_name')} failed{at_step(event.get('step'))}: {reason}"
            case "recovered":
                seconds, lost = event.get("seconds", 0.0), int(event.get("steps_lost") or 0)
                steps = f"{count(lost, 'step')} repeated" if lost else "no step lost"
                yield f"continued at step {event.get('step')} after {duration(float(seconds))}, {steps}"
    effective_pct = summary_value(summary, "effective_time_pct")
    if effective_pct is not None and summary.get("restarts"):
        yield f"{effective_pct:.0f}% of the time was training"


def _kept(run_dir: RunDir) -> Collection[str] | None:
    """Return the names of the checkpoints that are there; None if the store does not answer."""
    if (remote := run_dir.remote_checkpoints) is None:
        return [path.name for path in run_dir.checkpoints.glob("*")]
    try:
        return [entry.name for entry in remote.list()]
    except OSError:
        return None


def _place(run_dir: RunDir, kept: Collection[str] | None, saved: Mapping[str, Any]) -> str:
    """Return where a checkpoint is that was ``saved``, or that it is no longer there."""
    name = posixpath.basename(str(saved.get("path")))
    return run_dir.location_of(run_dir.checkpoints / name) if kept is None or name in kept else "no longer there"


def _checkpoint(saved: Mapping[str, Any], place: Callable[[Mapping[str, Any]], str]) -> str:
    return f"step {saved.get('step')}, {size(float(saved.get('size_bytes', 0)))}: {place(saved)}"


def _best(best: Any, events: Sequence[Mapping[str, Any]], place: Callable[[Mapping[str, Any]], str]) -> Iterator[str]:
    """The best evaluation by ``checkpoint.best``, and its checkpoint."""
    if not isinstance(best, Mapping) or not isinstance(best.get("value"), (int, float)):
        return
    step, of_step = best.get("step"), [event for event in events if event.get("event") == "checkpoint_saved"]
    saved = next((event for event in reversed(of_step) if event.get("step") == step), None)
    where = "its checkpoint was not saved" if saved is None else place(saved)
    yield f"{best.get('metric')} {number(best['value'])} at step {step}: {where}"


def _files(run_dir: RunDir) -> Iterator[str]:
    names = {
        run_dir.config_file: "the configuration",
        run_dir.choice_report: "why strategy=auto chose this strategy",
        run_dir.logs: "the output of each rank",
        run_dir.timeline_trace: "what each stage did in a step",
        run_dir.profile: "traces of ten steps",
        run_dir.samples: "samples of the model",
    }
    for path, meaning in names.items():
        if path.exists():
            yield f"{path.name + ('/' if path.is_dir() else ''):<14}{meaning}"


def _tracking(run_dir: RunDir, record: Mapping[str, Any]) -> Iterator[str]:
    try:
        uploaded = read_json(run_dir.tracking_file)
    except (OSError, ValueError):
        uploaded = {}
    if (page := uploaded.get("page")) and (run_id := uploaded.get("run_id")):
        yield f"View run: {run_page(page, run_id)}"
        yield f"charts: {page}"
    elif (run_id := record.get("mlflow_run_id")) is not None:
        yield f"run {run_id} on {(record.get('tracking') or {}).get('uri')}"


def _next_commands(
    run_dir: RunDir, record: Mapping[str, Any], verb: Callable[..., str], *, resumable: bool
) -> Iterator[str]:
    command = str(record.get("command", ""))
    if resumable and command and not command.startswith(_PYTHON_CALL):
        words = [word for word in shlex.split(command) if not word.startswith("resume=")]
        yield shlex.join([*words, path_override("resume", run_dir.location)])
    if features.paths("verbs/compare.py"):
        sweep = record.get("sweep") or {}
        chosen = ("--sweep", sweep["id"][:8]) if sweep else ("--last", "5")
        yield verb("compare", *chosen, *search_options(OutputDir.containing(run_dir)))
    if record.get("mlflow_run_id") is None and (record.get("tracking") or {}).get("uri"):
        yield verb("sync", run_dir.location)

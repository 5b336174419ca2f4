"""How a run ended, as one description that the console, ``show`` and MLflow lay out, and in words for MLflow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.config.text import plain
from orchestrator.display.plain_text import count, duration, first_line, number, rate
from orchestrator.planning.mesh import recorded_mesh
from orchestrator.protocol.metrics import describe_sharing, summary_value, waited_s


@dataclass(frozen=True, kw_only=True)
class RunEnd:
    """How a run ended, or how far it has come. None, 0 and an empty text stand for what is not known.

    Attributes:
        status: FINISHED, PRUNED, FAILED or KILLED.
        reason: why it ended, in one line; empty if it has done all its steps.
        took_s: the seconds from the start to the end, without waits.
        results: the last loss and the results of evaluations, by their keys in the summary.
        step_ms: the median time of a step.
        startup_s: the seconds up to the first step.
        bubble_pct: the measured bubble of the pipeline, and the one in theory.
        warning: what makes the times doubtful.
        advice: what limited the speed, and what to change.
        recovery_s: how long each recovery took.
        steps_lost: the steps that were repeated.
    """

    status: str
    reason: str
    steps: int | None
    took_s: float | None
    results: Mapping[str, float]
    samples_per_s: float | None
    step_ms: float | None
    startup_s: float | None
    bubble_pct: tuple[float, float] | None
    warning: str
    advice: str
    restarts: int
    recovery_s: tuple[float, ...]
    steps_lost: int


def run_end(
    summary: Mapping[str, Any],
    *,
    status: str = "",
    reason: str = "",
    started: Any = None,
    ended: Any = None,
    evaluated: Sequence[str] = ("val_",),
) -> RunEnd:
    """Return the description of a run.

    Args:
        summary: the summary of the run, in this process or from a file.
        status: see :class:`RunEnd`.
        reason: why it ended; of several lines, the first counts.
        started: when, in seconds since the epoch; anything but a number if it is not known.
        ended: the same.
        evaluated: what the keys of the results of evaluations begin with.
    """
    keys = [key for key in summary if key == "final_loss" or key.startswith(tuple(evaluated))]
    is_timed = isinstance(started, (int, float)) and isinstance(ended, (int, float)) and ended >= started
    others = describe_sharing(summary)
    warning = (
        f"warning: other programs used {others} while the steps were timed; on a free machine the run may be faster"
    )
    steps, bubble, theory, restarts, lost = (
        summary_value(summary, key) for key in ("steps", "bubble_pct", "bubble_theory_pct", "restarts", "steps_lost")
    )
    return RunEnd(
        status=status,
        reason=first_line(reason),
        steps=None if steps is None else int(steps),
        took_s=ended - started - waited_s(summary) if is_timed else None,
        results={key: value for key in keys if (value := summary_value(summary, key)) is not None},
        samples_per_s=summary_value(summary, "samples_per_s"),
        step_ms=summary_value(summary, "step_ms_p50"),
        startup_s=summary_value(summary, "startup_s"),
        bubble_pct=None if bubble is None or theory is None else (bubble, theory),
        warning="" if others is None else warning,
        advice=str(summary.get("limit") or ""),
        restarts=int(restarts or 0),
        recovery_s=tuple(summary.get("recovery_s") or ()),
        steps_lost=int(lost or 0),
    )


_DEVICES = {"cuda": "GPU worker", "cpu": "CPU worker"}
_RESULTS = {"final_loss": "loss", "val_loss": "validation loss", "val_accuracy": "validation accuracy"}
_HOW = {"FINISHED": "finished", "PRUNED": "was pruned", "FAILED": "failed", "KILLED": "was stopped"}


def describe_run(record: Mapping[str, Any], summary: Mapping[str, Any], *, status: str, reason: str) -> str:
    """Return the plan, the speed, the result, the limit and the recoveries of a run in Markdown.

    Args:
        record: the contents of ``run.json`` at the end of the run.
        summary: the summary of the run.
        status: FINISHED, PRUNED, FAILED or KILLED.
        reason: why the run did not finish; empty if it did.
    """
    end = run_end(summary, status=status, reason=reason, started=record.get("started"), ended=record.get("ended"))
    sentences = [_what_ran(record, end), *_speed(end), *_limits(end)]
    if end.restarts:
        times = ", ".join(f"{seconds:.1f}" for seconds in end.recovery_s)
        took = f" in {times} s" if times else ""
        sentences.append(f"Recovered {count(end.restarts, 'time')}{took}; {count(end.steps_lost, 'step')} lost.")
    if status not in ("FINISHED", "PRUNED") and end.reason:
        sentences.append(f"Reason: {plain(end.reason)}")
    return " ".join(sentences)


def _what_ran(record: Mapping[str, Any], end: RunEnd) -> str:
    mesh = recorded_mesh((record.get("plan") or {}).get("mesh") or {})
    noun = _DEVICES.get((record.get("plan") or {}).get("device", ""), "worker")
    servers = mesh.num_servers
    where = count(mesh.num_workers, noun) + (f" and {count(servers, 'server')} of the parameters" if servers else "")
    what = f"Job **{record.get('job')}** with strategy **{record.get('strategy')}** on {where}"
    after = "" if end.status == "FINISHED" else "after "
    length = "" if end.steps is None else f" {after}{count(end.steps, 'step')}"
    took = "" if end.took_s is None else f" in {duration(end.took_s)}"
    resumed = (record.get("tags") or {}).get("resumed_from_step")
    began = "" if resumed is None else f" It was resumed from step {resumed}."
    dirty = (record.get("source") or {}).get("source.git.dirty") == "true"
    code = " The code has uncommitted changes." if dirty else ""
    return f"{what} {_HOW.get(end.status, end.status)}{length}{took}.{began}{code}"


def _speed(end: RunEnd) -> Iterator[str]:
    if end.samples_per_s is not None:
        median = "" if end.step_ms is None else f", {end.step_ms:.3g} ms a step (median)"
        yield f"Speed: **{rate(end.samples_per_s)} samples/s**{median}."
    if found := [f"{name} {number(end.results[key])}" for key, name in _RESULTS.items() if key in end.results]:
        yield f"Final {', '.join(found)}."


def _limits(end: RunEnd) -> Iterator[str]:
    if end.advice:
        yield f"{end.advice[0].upper()}{end.advice[1:]}."
    if end.bubble_pct is not None:
        bubble, theory = end.bubble_pct
        yield f"Pipeline bubble: {bubble:.0f}%, in theory {theory:.0f}%."
    if end.startup_s is not None:
        yield f"Start-up: {duration(end.startup_s)}."


def run_page(page: str, run_id: str) -> str:
    """Return the address of a run in MLflow; ``page``: that of the charts with it."""
    return f"{page.partition('?')[0]}/{run_id}?workflowType=machine_learning"  # without it, MLflow shows those of LLMs

"""The end of a run in words, for readers who see nothing else of it, as in MLflow. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from orchestrator.config.markdown import plain
from orchestrator.display.run_end import RunEnd, run_end
from orchestrator.display.text import count, duration, number, rate
from orchestrator.planning.mesh import recorded_mesh

_DEVICES = {"cuda": "GPU worker", "cpu": "CPU worker"}
_RESULTS = {"final_loss": "loss", "val_loss": "validation loss", "val_accuracy": "validation accuracy"}
_HOW = {"FINISHED": "finished", "PRUNED": "was pruned", "FAILED": "failed", "KILLED": "was stopped"}


def describe_run(record: Mapping[str, Any], summary: Mapping[str, Any], *, status: str, reason: str) -> str:
    """Return in Markdown what ran where, how fast, what it reached, what limited it, and how it recovered.

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
    dirty = (record.get("source") or {}).get("source.git.dirty") == "true"
    code = " The code has uncommitted changes." if dirty else ""
    return f"{what} {_HOW.get(end.status, end.status)}{length}{took}.{code}"


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
    if end.profiled:
        yield f"Profiled {end.profiled}."
    if end.startup_s is not None:
        yield f"Start-up: {duration(end.startup_s)}."

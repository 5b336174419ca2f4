"""The end of a run in words, for readers who see nothing else of it, as in MLflow. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.config.markdown import plain
from orchestrator.display.text import count, duration, first_line, number, rate
from orchestrator.planning.mesh import recorded_mesh
from orchestrator.protocol.metrics import summary_value, waited_s

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
    sentences = [
        _outcome(record, summary, status),
        *_speed(summary),
        *_results(summary),
        *_limits(summary),
        *_recovery(summary),
    ]
    if status not in ("FINISHED", "PRUNED") and reason:
        sentences.append(f"Reason: {plain(first_line(reason))}")
    return " ".join(sentences)


def _outcome(record: Mapping[str, Any], summary: Mapping[str, Any], status: str) -> str:
    mesh = recorded_mesh((record.get("plan") or {}).get("mesh") or {})
    noun = _DEVICES.get((record.get("plan") or {}).get("device", ""), "worker")
    servers = mesh.num_servers
    where = count(mesh.num_workers, noun) + (f" and {count(servers, 'server')} of the parameters" if servers else "")
    what = f"Job **{record.get('job')}** with strategy **{record.get('strategy')}** on {where}"
    steps = summary_value(summary, "steps")
    length = "" if steps is None else f" {'' if status == 'FINISHED' else 'after '}{count(int(steps), 'step')}"
    started, ended = record.get("started"), record.get("ended")
    took = f" in {duration(ended - started - waited_s(summary))}" if started and ended else ""
    dirty = (record.get("source") or {}).get("source.git.dirty") == "true"
    code = " The code has uncommitted changes." if dirty else ""
    return f"{what} {_HOW.get(status, status)}{length}{took}.{code}"


def _speed(summary: Mapping[str, Any]) -> list[str]:
    samples_per_s, step_ms = summary_value(summary, "samples_per_s"), summary_value(summary, "step_ms_p50")
    if samples_per_s is None:
        return []
    median = "" if step_ms is None else f", {step_ms:.3g} ms a step (median)"
    return [f"Speed: **{rate(samples_per_s)} samples/s**{median}."]


def _results(summary: Mapping[str, Any]) -> list[str]:
    found = [
        f"{name} {number(value)}"
        for key, name in _RESULTS.items()
        if (value := summary_value(summary, key)) is not None
    ]
    return [f"Final {', '.join(found)}."] if found else []


def _limits(summary: Mapping[str, Any]) -> list[str]:
    sentences = []
    if limit := str(summary.get("limit") or ""):
        sentences.append(f"{limit[0].upper()}{limit[1:]}.")
    bubble, theory = summary_value(summary, "bubble_pct"), summary_value(summary, "bubble_theory_pct")
    if bubble is not None and theory is not None:
        sentences.append(f"Pipeline bubble: {bubble:.0f}%, in theory {theory:.0f}%.")
    if profiled := summary.get("profiled"):
        sentences.append(f"Profiled {profiled}.")
    if (startup := summary_value(summary, "startup_s")) is not None:
        sentences.append(f"Start-up: {duration(startup)}.")
    return sentences


def _recovery(summary: Mapping[str, Any]) -> list[str]:
    if not (restarts := int(summary_value(summary, "restarts") or 0)):
        return []
    times = ", ".join(f"{seconds:.1f}" for seconds in summary.get("recovery_s") or ())
    took = f" in {times} s" if times else ""
    lost = int(summary_value(summary, "steps_lost") or 0)
    return [f"Recovered {count(restarts, 'time')}{took}; {count(lost, 'step')} lost."]

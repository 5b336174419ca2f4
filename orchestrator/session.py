"""Runs one after another on one Ray: checks everything first, then starts."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from orchestrator import timeline
from orchestrator.config.build import ConfigError
from orchestrator.config.compose import compose, to_dict
from orchestrator.config.redact import redact_text, secret_values
from orchestrator.config.schema import Config
from orchestrator.driver import cluster, prepare
from orchestrator.driver.run import Run, RunResult, RunSpec, StopSignals
from orchestrator.events import RunEnded, Sink, Warned
from orchestrator.job import Job, load_job
from orchestrator.plan import Node, Plan, make_plan
from orchestrator.report import plan_table
from orchestrator.rundir import RunDir, process_started_at
from orchestrator.tracking.console import make_console
from orchestrator.tracking.journal import Journal
from orchestrator.tracking.uploader import Uploader, recover_orphans


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A run that passed every check that needs no cluster."""

    config: Config
    job: Job
    resume: prepare.Resume | None
    warnings: tuple[str, ...]


def check(overrides: Sequence[str]) -> Candidate:
    """Everything that can be checked before Ray is asked.

    Raises:
        ConfigError: with all faults.
    """
    faults: list[str] = []
    warnings: list[str] = []
    config, job_spec = compose(overrides, faults)
    job = load_job(job_spec, faults) if job_spec is not None else None
    if config is not None:
        config = prepare.absolute_paths(config)
        faults += prepare.environment_faults(config)
    if faults or config is None or job is None:
        raise ConfigError(faults)
    resume = prepare.find_resume(config, job, warnings=warnings)
    return Candidate(config=config, job=job, resume=resume, warnings=tuple(warnings))


def check_all(runs: Sequence[Sequence[str]]) -> list[Candidate]:
    """Check every run of a sweep before the first one starts.

    Raises:
        ConfigError: with the faults of all of them.
    """
    candidates: list[Candidate] = []
    faults: list[str] = []
    for overrides in runs:
        try:
            candidates.append(check(overrides))
        except ConfigError as e:
            faults.extend(e.faults)
    if faults:
        raise ConfigError(faults)
    return candidates


def run_all(candidates: Sequence[Candidate], *, name: str = "sweep") -> list[RunResult]:
    """Run each in turn on one Ray; several are a sweep under one parent.

    Raises:
        ConfigError: the cluster cannot be reached, or a plan does not fit it; nothing was started.
    """
    sweep = {"id": uuid.uuid4().hex, "name": name} if len(candidates) > 1 else None
    results: list[RunResult] = []
    with _ray(candidates) as (nodes, plans):
        if candidates[0].config.plan:
            for plan in plans:
                print(plan_table(plan, nodes))
            return []
        recover_orphans(Path(candidates[0].config.output_dir))
        started_at = process_started_at()
        for candidate, plan in zip(candidates, plans, strict=True):
            results.append(_run(candidate, plan, sweep=sweep, started_at=started_at))
            started_at = time.time()
            if results[-1].status == "KILLED":
                break
    return results


@contextlib.contextmanager
def _ray(candidates: Sequence[Candidate]) -> Iterator[tuple[tuple[Node, ...], list[Plan]]]:
    """A connection for all runs, and their plans on it. An embedded Ray starts after planning."""
    config = candidates[0].config
    address = cluster.target_address(config.cluster)
    if address is not None:
        connection = cluster.connect(address)
        try:
            nodes = cluster.nodes()
            yield nodes, _plans(candidates, nodes, oversubscribe_cpus=False)
        finally:
            cluster.disconnect(connection)
        return
    machine = cluster.this_machine(torch.cuda.device_count())
    plans = _plans(candidates, (machine,), oversubscribe_cpus=True)
    if config.plan:
        yield (machine,), plans
        return
    needed = max(p.world_size * p.cpus_per_worker for p in plans)
    connection = cluster.embed(config.cluster, num_cpus=max(machine.cpus, needed), num_gpus=machine.gpus)
    try:
        yield (machine,), plans
    finally:
        cluster.disconnect(connection)


def _plans(candidates: Sequence[Candidate], nodes: tuple[Node, ...], *, oversubscribe_cpus: bool) -> list[Plan]:
    return [make_plan(c.config, nodes, oversubscribe_cpus=oversubscribe_cpus) for c in candidates]


def _run(candidate: Candidate, plan: Plan, *, sweep: dict[str, str] | None, started_at: float) -> RunResult:
    config, resume = candidate.config, candidate.resume
    run_dir, uid = prepare.open_run(config, candidate.job, plan, resume, sweep=sweep)
    console = make_console(steps=plan.steps, world_size=plan.world_size)
    secrets = secret_values(to_dict(config))
    journal = Journal(run_dir, secrets=secrets, warn=lambda m: console.emit(Warned(message=m)))
    spec = RunSpec(
        config=config,
        plan=plan,
        run_dir=run_dir,
        run_uid=uid,
        checkpoint=None if resume is None else resume.checkpoint,
        resumed_from_step=None if resume is None else resume.step,
        started_at=started_at,
        tokens_per_sample=candidate.job.tokens_per_sample,
        secrets=secrets,
    )
    with StopSignals(console.close) as stop:
        uploader = Uploader.start(run_dir, config.tracking)
        try:
            for warning in candidate.warnings:
                console.emit(Warned(message=warning))
            try:
                result = Run(spec, [journal, console], stop, tracking_problem=uploader.problem).execute()
            except Exception as e:
                # A fault of ours; the records tell the truth about the run all the same.
                reason = redact_text(f"{type(e).__name__}: {e}", secrets)
                ended = RunResult(status="FAILED", exit_code=1, run_dir=run_dir.path, reason=reason)
                _finish(ended, plan, run_dir, uploader, journal, console, config)
                raise
            result = _finish(result, plan, run_dir, uploader, journal, console, config)
        finally:
            journal.close()
            console.close()
    return result


def _finish(
    result: RunResult,
    plan: Plan,
    run_dir: RunDir,
    uploader: Uploader,
    journal: Journal,
    console: Sink,
    config: Config,
) -> RunResult:
    """Write the end down, let MLflow have the rest, say the verdict last."""
    run_dir.update_record(state=result.status.lower(), ended=time.time(), summary=dict(result.summary))
    summary = {**result.summary, **_write_timeline(result, plan, run_dir, console)}
    ended = RunEnded(
        status=result.status,
        exit_code=result.exit_code,
        reason=result.reason,
        summary=summary,
    )
    journal.emit(ended)
    stopped = result.status == "KILLED"
    upload = uploader.leave() if stopped else uploader.finish(timeout_s=config.tracking.flush_timeout_s)
    summary = {**summary, "mlflow_run_id": upload.run_id}
    run_dir.update_record(summary=summary, mlflow_run_id=upload.run_id)
    commands = _next_commands(result, config, missing_points=0 if stopped else upload.missing)
    console.emit(replace(ended, summary=summary, next_commands=commands))
    return replace(result, summary=summary)


def _write_timeline(result: RunResult, plan: Plan, run_dir: RunDir, console: Sink) -> dict[str, str]:
    """Where the timeline is, for the summary; nothing if there is none."""
    if result.timeline is None or plan.pipeline is None:
        return {}
    title = f"{plan.job}: {plan.strategy}, {plan.pipeline.schedule}"
    try:
        timeline.write(result.timeline, run_dir, title=title)
    except Exception as e:  # whatever hinders a picture, it is no reason to fail a run
        console.emit(Warned(message=f"no timeline was drawn: {type(e).__name__}: {e}"))
        return {}
    return {"timeline": str(run_dir.timeline_picture)}


def _next_commands(result: RunResult, config: Config, *, missing_points: int) -> tuple[str, ...]:
    commands = []
    if result.status != "FINISHED":
        commands.append(f"python -m orchestrator.launch ... resume={result.run_dir}")
    if missing_points:
        commands.append(f"python -m orchestrator.sync {result.run_dir}")
    commands.append("python -m orchestrator.compare --last 5")
    if config.tracking.uri is not None and config.tracking.uri.startswith("sqlite"):
        commands.append(f"mlflow ui --backend-store-uri {config.tracking.uri}")
    return tuple(commands)

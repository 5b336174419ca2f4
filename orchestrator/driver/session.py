"""Runs one after another on one Ray: checks everything first, then starts."""

from __future__ import annotations

import contextlib
import functools
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from orchestrator.config.build import ConfigError, gathering
from orchestrator.config.compose import compose, to_dict
from orchestrator.config.job_loader import load_job
from orchestrator.config.redact import redact_text, secret_values
from orchestrator.config.schema import Config
from orchestrator.display.console import make_console
from orchestrator.display.report import plan_table
from orchestrator.driver import cluster
from orchestrator.driver.preflight import prepare
from orchestrator.driver.run import Run, RunResult, RunSpec
from orchestrator.driver.signals import StopSignals
from orchestrator.job import Job
from orchestrator.planning.plan import Node, Plan, make_plan
from orchestrator.policy.elastic import Sizes
from orchestrator.protocol.events import RunEnded, Sink, Warned
from orchestrator.records.journal import Journal
from orchestrator.records.lease import SupersededError
from orchestrator.records.run_dir import RunDir, process_started_at, write_json
from orchestrator.strategies import registry
from orchestrator.timeline.draw import draw, trace
from orchestrator.tracking.uploader import Uploader, recover_orphans


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A run that passed every check. ``sizes``: None where the cluster has to be asked for its nodes."""

    overrides: tuple[str, ...]
    config: Config
    job: Job
    resume: prepare.Resume | None
    sizes: Sizes | None
    warnings: tuple[str, ...]


def check_all(runs: Sequence[Sequence[str]]) -> list[Candidate]:
    """Check each run, given by its overrides, before the first one starts.

    Raises:
        ConfigError: with the faults of all of them.
    """
    address_error = functools.cache(cluster.address_error)
    candidates, errors = [], []
    for overrides in runs:
        of_this_run: list[str] = []
        candidate = _check(overrides, address_error, of_this_run)
        errors += of_this_run
        if candidate is not None:
            candidates.append(candidate)
    if errors:
        raise ConfigError(errors)
    return candidates


def _check(overrides: Sequence[str], address_error: Callable[[str], str | None], errors: list[str]) -> Candidate | None:
    """Everything that can be checked before Ray starts or is joined, each part even if another has faults."""
    config, job_spec = compose(overrides, errors, registry.config_class)
    job = load_job(job_spec, errors) if job_spec is not None else None
    surroundings = config or _surroundings(overrides)
    if surroundings is not None:
        errors += prepare.environment_errors(prepare.absolute_paths(surroundings))
    if config is None:
        return None
    config = prepare.absolute_paths(config)
    warnings: list[str] = []
    resume, sizes = None, None
    with gathering(errors):
        resume = prepare.find_resume(config, job, warnings=warnings)
    address = cluster.target_address(config.cluster)
    if address is None:
        sizes = _sizes(config, job, (_this_machine(),), errors, oversubscribe_cpus=True)
    elif error := address_error(address):
        errors.append(error)
    if job is None:
        return None
    return Candidate(
        overrides=tuple(overrides), config=config, job=job, resume=resume, sizes=sizes, warnings=tuple(warnings)
    )


def _surroundings(overrides: Sequence[str]) -> Config | None:
    """The configuration by the words alone that say where results go; None if they have faults too."""
    words = [w for w in overrides if w.startswith(("output_dir=", "tracking=", "tracking."))]
    config, _ = compose(words, [], registry.config_class)
    return config


def _sizes(
    config: Config, job: Job | None, nodes: tuple[Node, ...], errors: list[str], *, oversubscribe_cpus: bool
) -> Sizes | None:
    """The plans that the run may have; one with room on the nodes is the first.

    None: there is none, for reasons that are added to ``errors``.
    """
    asked = config.strategy.num_workers
    if not isinstance(asked, tuple):
        plan = _plan(config, job, nodes, errors, oversubscribe_cpus=oversubscribe_cpus)
        return None if plan is None else Sizes((plan,), plan)
    least, most = asked
    plans: dict[int, Plan] = {}
    have_room: list[int] = []
    of_smallest: list[str] = []
    for n in range(most, least - 1, -1):
        fixed = _at_size(config, n, largest=next(iter(plans.values()), None))
        if fixed is None:
            continue
        of_smallest = []
        _plan(fixed, job, nodes, of_smallest, oversubscribe_cpus=oversubscribe_cpus)
        have_room += [] if of_smallest else [n]
        growing = replace(fixed, cluster=replace(fixed.cluster, autoscaling=True))
        anywhere: list[str] = []
        plan = _plan(growing, job, nodes, anywhere, oversubscribe_cpus=oversubscribe_cpus)
        if plan is not None and not anywhere:
            note = f"as many workers as there are, {least} to {most}; the global batch stays"
            plans[n] = replace(plan, notes=(*plan.notes, note))
    if not have_room:
        errors += of_smallest
        return None
    return Sizes(tuple(reversed(plans.values())), plans[have_room[0]])


def _at_size(config: Config, num_workers: int, *, largest: Plan | None) -> Config | None:
    """``config`` with this number of workers; None if workers of the ``largest`` size could not continue with it."""
    if largest is None:
        return replace(config, strategy=replace(config.strategy, num_workers=num_workers))
    rules = registry.load(config.strategy.name)
    strategy = rules.resized(config.strategy, num_workers, mesh=largest.mesh, pipeline=largest.pipeline)
    if strategy is None:
        return None
    # The rank of an injected fault may exist in the largest size alone.
    return replace(config, strategy=strategy, recovery=replace(config.recovery, chaos=()))


def _plan(
    config: Config, job: Job | None, nodes: tuple[Node, ...], errors: list[str], *, oversubscribe_cpus: bool
) -> Plan | None:
    with gathering(errors):
        strategy = registry.load(config.strategy.name)
        plan = make_plan(config, strategy, nodes, oversubscribe_cpus=oversubscribe_cpus)
        if job is None:
            return plan
        return replace(plan, notes=(*plan.notes, *strategy.check_job(config, job, plan, errors)))
    return None


def _this_machine() -> Node:
    return cluster.this_machine(torch.cuda.device_count())


def run_all(candidates: Sequence[Candidate], *, owns_process: bool = False) -> list[RunResult]:
    """Run each in turn on one Ray; several are a sweep under one parent.

    ``owns_process``: SIGINT and SIGTERM may end the process while Ray starts.

    Raises:
        ConfigError: the cluster cannot be reached, or a plan does not fit it; nothing was started.
        KeyboardInterrupt: SIGINT or SIGTERM came while Ray was starting; nothing was started.
    """
    sweep = {"id": uuid.uuid4().hex, "name": _sweep_name(candidates)} if len(candidates) > 1 else None
    results: list[RunResult] = []
    with StopSignals(impatient=owns_process) as stop, _ray(candidates) as (nodes, all_sizes):
        if candidates[0].config.plan:
            for sizes in all_sizes:
                print(plan_table(sizes.first, nodes))
            return []
        stop.impatient = False
        if stop.received is not None:
            raise KeyboardInterrupt
        recover_orphans(Path(candidates[0].config.output_dir))
        started_at = process_started_at()
        for candidate, sizes in zip(candidates, all_sizes, strict=True):
            results.append(_run(candidate, sizes, stop, sweep=sweep, started_at=started_at))
            started_at = time.time()
            if results[-1].status == "KILLED":
                break
    return results


def _sweep_name(candidates: Sequence[Candidate]) -> str:
    """What differs between its runs, as it was asked for: ``strategy=single,ddp``."""
    values: dict[str, dict[str, None]] = {}
    for candidate in candidates:
        for word in candidate.overrides:
            key, _, value = word.partition("=")
            values.setdefault(key, {})[value] = None
    return " ".join(f"{key}={','.join(given)}" for key, given in values.items() if len(given) > 1) or "sweep"


@contextlib.contextmanager
def _ray(candidates: Sequence[Candidate]) -> Iterator[tuple[tuple[Node, ...], list[Sizes]]]:
    """A connection for all runs, and their sizes on it. An embedded Ray starts after planning."""
    config = candidates[0].config
    address = cluster.target_address(config.cluster)
    if address is not None:
        connection = cluster.connect(address)
        try:
            nodes = cluster.nodes()
            yield nodes, _all_sizes(candidates, nodes)
        finally:
            cluster.disconnect(connection)
        return
    machine = _this_machine()
    sizes = [c.sizes for c in candidates if c.sizes is not None]
    if config.plan:
        yield (machine,), sizes
        return
    needed = max((s.most.world_size + s.most.spares) * s.most.cpus_per_worker for s in sizes)
    connection = cluster.embed(config.cluster, num_cpus=max(machine.cpus, needed), num_gpus=machine.gpus)
    try:
        yield (machine,), sizes
    finally:
        cluster.disconnect(connection)


def _all_sizes(candidates: Sequence[Candidate], nodes: tuple[Node, ...]) -> list[Sizes]:
    """On the nodes of a cluster."""
    errors: list[str] = []
    sizes = [_sizes(c.config, c.job, nodes, errors, oversubscribe_cpus=False) for c in candidates]
    if errors:
        raise ConfigError(errors)
    return [s for s in sizes if s is not None]


def _run(
    candidate: Candidate, sizes: Sizes, stop: StopSignals, *, sweep: dict[str, str] | None, started_at: float
) -> RunResult:
    config, resume, plan = candidate.config, candidate.resume, sizes.first
    secrets = secret_values(to_dict(config))
    command = prepare.command(candidate.overrides, secrets)
    run_dir, uid = prepare.open_run(config, candidate.job, plan, resume, command=command, sweep=sweep)
    console = make_console(steps=plan.steps, world_size=plan.world_size)
    stop.last_words = console.close
    journal = Journal(run_dir, secrets=secrets, warn=lambda m: console.emit(Warned(message=m)))
    spec = RunSpec(
        config=config,
        sizes=sizes,
        run_dir=run_dir,
        run_uid=uid,
        checkpoint=None if resume is None else resume.checkpoint,
        resumed_from_step=None if resume is None else resume.step,
        started_at=started_at,
        tokens_per_sample=candidate.job.tokens_per_sample,
        secrets=secrets,
    )
    uploader = Uploader.start(run_dir, config.tracking)
    again = prepare.command((*candidate.overrides, f"resume={run_dir.path}"), secrets)
    finish = functools.partial(_finish, plan, run_dir, uploader, journal, console, config, again)
    try:
        for warning in candidate.warnings:
            console.emit(Warned(message=warning))
        try:
            result = Run(spec, [journal, console], stop, tracking_problem=uploader.problem).execute()
        except SupersededError as e:
            console.emit(RunEnded(status="FAILED", exit_code=1, reason=str(e), summary={}))
            return RunResult(status="FAILED", exit_code=1, run_dir=run_dir.path, reason=str(e))
        except Exception as e:
            # A fault of ours; the records tell the truth about the run all the same.
            reason = redact_text(f"{type(e).__name__}: {e}", secrets)
            ended = RunResult(status="FAILED", exit_code=1, run_dir=run_dir.path, reason=reason)
            finish(ended)
            raise
        result = finish(result)
    finally:
        journal.close()
        console.close()
    return result


def _finish(
    plan: Plan,
    run_dir: RunDir,
    uploader: Uploader,
    journal: Journal,
    console: Sink,
    config: Config,
    again: str,
    result: RunResult,
) -> RunResult:
    """Write the end down, let MLflow have the rest, say the verdict last. ``again``: what continues the run."""
    run_dir.update_record(state=result.status.lower(), ended=time.time(), summary=dict(result.summary))
    summary = {**result.summary, **_write_timeline(result, plan, run_dir, console)}
    if run_dir.profile.is_dir():
        summary["profile"] = str(run_dir.profile)
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
    commands = _next_commands(result, config, again, missing_points=0 if stopped else upload.missing)
    console.emit(replace(ended, summary=summary, next_commands=commands))
    return replace(result, summary=summary)


def _write_timeline(result: RunResult, plan: Plan, run_dir: RunDir, console: Sink) -> dict[str, str]:
    """Where the timeline is, for the summary; nothing if there is none."""
    if result.timeline is None or plan.pipeline is None:
        return {}
    title = f"{plan.job}: {plan.strategy}, {plan.pipeline.schedule}"
    try:
        write_json(run_dir.timeline_trace, trace(result.timeline))
        draw(result.timeline, run_dir.timeline_picture, title=title)
    except Exception as e:  # whatever hinders a picture, it is no reason to fail a run
        console.emit(Warned(message=f"no timeline was drawn: {type(e).__name__}: {e}"))
        return {}
    return {"timeline": str(run_dir.timeline_picture)}


def _next_commands(result: RunResult, config: Config, again: str, *, missing_points: int) -> tuple[str, ...]:
    commands = [] if result.status == "FINISHED" else [again]
    if missing_points:
        commands.append(f"python -m orchestrator.sync {result.run_dir}")
    commands.append("python -m orchestrator.compare --last 5")
    if config.tracking.uri is not None and config.tracking.uri.startswith("sqlite"):
        commands.append(f"mlflow ui --backend-store-uri {config.tracking.uri}")
    return tuple(commands)

"""One launch: checks all runs of a command before the first one starts, then executes them on one Ray."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from orchestrator.config.build import ConfigError, collect_errors
from orchestrator.config.compose import compose, to_dict
from orchestrator.config.job_loader import is_importable, load_job
from orchestrator.config.overrides import quote_text, values, with_strategy
from orchestrator.config.redact import Redactor
from orchestrator.config.schema import Config
from orchestrator.display.console import make_console
from orchestrator.display.report import plan_table
from orchestrator.driver import cluster
from orchestrator.driver.decision import Decision, NotMeasuredError, chosen_before
from orchestrator.driver.ending import RunEnding
from orchestrator.driver.event_stream import EventStream, FailureSink, RedactingSink
from orchestrator.driver.given_job import PickledJob, job_override, pickle_job
from orchestrator.driver.preflight.params import plain_fields
from orchestrator.driver.preflight.paths import absolute_paths, environment_errors, output_dir
from orchestrator.driver.preflight.record import command_line, open_run
from orchestrator.driver.preflight.resume import Resume, find_resume
from orchestrator.driver.result import RunResult
from orchestrator.driver.run import Run, RunSpec
from orchestrator.driver.signals import StopSignals
from orchestrator.driver.stop_requests import StopRequests
from orchestrator.driver.sweep import Sweep
from orchestrator.driver.uploads import RecordUpload
from orchestrator.driver.worker_variables import worker_variables
from orchestrator.job import Job
from orchestrator.planning.plan import Node, Plan, make_plan
from orchestrator.policy.elastic import Sizes
from orchestrator.protocol.events import RunEnded, Sink, Warned
from orchestrator.records.journal import Journal
from orchestrator.records.lease import Lease, SupersededError
from orchestrator.records.process import process_started_at
from orchestrator.strategies import registry
from orchestrator.tracking.uploader import Uploader, recover_orphans

if TYPE_CHECKING:
    from orchestrator.driver.auto import Chooser

AUTO = "auto"
"""The strategy that chooses another one."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A run that passed every check.

    ``resume``: the run to continue; None for a new one. ``sizes``: None until the cluster is joined, if its nodes
    decide. ``decision``: how ``strategy=auto`` has chosen the strategy; None if it has not.
    """

    overrides: tuple[str, ...]
    config: Config
    job: Job
    resume: Resume | None
    sizes: Sizes | None
    warnings: tuple[str, ...]
    redactor: Redactor
    given: PickledJob | None
    decision: Decision | None = None

    @property
    def is_auto(self) -> bool:
        """Whether the strategy is still to be chosen."""
        return self.config.strategy.name == AUTO


def check_all(
    runs: Sequence[Sequence[str]],
    redactor: Redactor | None = None,
    job: Job | type[Job] | None = None,
    sweep: Sweep | None = None,
) -> list[Candidate]:
    """Check all runs, each given by its overrides, before the first one starts.

    Args:
        runs: the overrides of each run.
        redactor: learns the secrets of all runs; None to use a new one.
        job: the job of all runs, if it is given as an object.
        sweep: the sweep that the runs belong to, which may leave out runs with errors.

    Raises:
        ConfigError: with the errors of all of them.
    """
    redactor = redactor or Redactor.of_process()
    address_error = functools.cache(cluster.address_error)
    candidates: list[Candidate] = []
    errors: list[str] = []
    for overrides in runs:
        run_errors: list[str] = []
        candidate = _check(overrides, address_error, run_errors, redactor, job)
        run_errors = list(dict.fromkeys(redactor.text(error) for error in run_errors))
        if sweep is not None and run_errors and sweep.leaves_out(overrides, run_errors):
            continue
        errors += run_errors
        if candidate is not None:
            candidates.append(candidate)
    if sweep is not None and not candidates:
        errors += sweep.errors
    if errors:
        raise ConfigError(errors)
    return candidates


def _check(
    overrides: Sequence[str],
    address_error: Callable[[str], str | None],
    errors: list[str],
    redactor: Redactor,
    job_argument: Job | type[Job] | None,
) -> Candidate | None:
    """Check everything that can be checked before Ray starts or is joined; each part even if another has errors."""
    typed = tuple(overrides)
    if job_argument is not None:
        overrides = (*typed, job_override(job_argument))
        if isinstance(job_argument, type) and is_importable(job_argument):
            typed, job_argument = tuple(overrides), None
    redactor.learn(values(overrides))
    config, job_spec = compose(overrides, errors, registry.config_class)
    if config is not None:
        redactor.learn(to_dict(config))
    job = load_job(job_spec, errors, redactor, job_argument) if job_spec is not None else None
    pickled = None if job_argument is None or job is None else pickle_job(job_argument, job, errors)
    if config is not None and job is not None and isinstance(job_argument, Job):
        config = replace(config, job=replace(config.job, fields=plain_fields(job)))
    paths = config or _paths_config(overrides)
    if paths is not None:
        errors += environment_errors(absolute_paths(paths))
    if config is None:
        return None
    config = absolute_paths(config)
    with collect_errors(errors):
        worker_variables(config.cluster.env, os.environ)
    warnings: list[str] = []
    resume, sizes = None, None
    with collect_errors(errors):
        resume = find_resume(config, job, warnings=warnings, redactor=redactor)
    if resume is not None and config.strategy.name == AUTO:
        if (chosen := chosen_before(resume.run_dir)) is None:
            errors.append(f"resume={config.resume}: strategy=auto did not choose its strategy; give strategy=<name>")
            return None
        return _check(_with_choice(typed, config, chosen), address_error, errors, redactor, job_argument)
    address = cluster.target_address(config.cluster)
    if address is None:
        if config.sweep.unfit == "skip":
            _sizes(config, None, (_this_machine(),), errors, oversubscribe_cpus=False)
        sizes = _sizes(config, job, (_this_machine(),), errors, oversubscribe_cpus=True)
    elif error := address_error(address):
        errors.append(error)
    if job is None:
        return None
    return Candidate(
        overrides=typed,
        config=config,
        job=job,
        resume=resume,
        sizes=sizes,
        warnings=tuple(warnings),
        redactor=redactor,
        given=pickled,
    )


def _paths_config(overrides: Sequence[str]) -> Config | None:
    """Compose only the overrides that say where results go; None if these have errors too."""
    overrides = [o for o in overrides if o.startswith(("output_dir=", "storage.", "tracking=", "tracking."))]
    config, _ = compose(overrides, [], registry.config_class)
    return config


def _sizes(
    config: Config, job: Job | None, nodes: tuple[Node, ...], errors: list[str], *, oversubscribe_cpus: bool
) -> Sizes | None:
    """The plans that the run may have; one with room on the nodes is the first.

    None: there is none, for reasons that are added to ``errors``.
    """
    requested = config.strategy.num_workers
    if not isinstance(requested, tuple):
        plan = _plan(config, job, nodes, errors, oversubscribe_cpus=oversubscribe_cpus)
        return None if plan is None else Sizes((plan,), plan)
    least, most = requested
    plans: dict[int, Plan] = {}
    have_room: list[int] = []
    smallest_size_errors: list[str] = []
    for n in range(most, least - 1, -1):
        sized = _at_size(config, n, largest=next(iter(plans.values()), None))
        if sized is None:
            continue
        room_errors: list[str] = []
        layout_errors: list[str] = []
        _plan(sized, None, nodes, room_errors, oversubscribe_cpus=oversubscribe_cpus)
        growing = replace(sized, cluster=replace(sized.cluster, autoscaling=True))
        plan = _plan(growing, job, nodes, layout_errors, oversubscribe_cpus=oversubscribe_cpus)
        if plan is not None and not layout_errors:
            note = f"as many workers as there are, {least} to {most}; the global batch stays"
            plans[n] = replace(plan, notes=(*plan.notes, note))
            have_room += [] if room_errors else [n]
        smallest_size_errors = room_errors or layout_errors
    if not have_room:
        errors += smallest_size_errors
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
    with collect_errors(errors):
        strategy = registry.load(config.strategy.name)
        plan = make_plan(config, strategy, nodes, oversubscribe_cpus=oversubscribe_cpus)
        if job is None:
            return plan
        return replace(plan, notes=(*plan.notes, *strategy.check(config, job, plan, errors)))
    return None


def _this_machine() -> Node:
    return cluster.this_machine(torch.cuda.device_count())


def run_all(
    candidates: Sequence[Candidate], *, owns_process: bool = False, sweep: Sweep | None = None
) -> list[RunResult]:
    """Execute the runs one after another on one Ray.

    Args:
        candidates: what :func:`check_all` returned.
        owns_process: SIGINT and SIGTERM may end the process, as on the command line.
        sweep: the sweep that the runs belong to.

    Returns:
        The results of the runs that were started. In a sweep, a run that could not be started has none.

    Raises:
        ConfigError: the cluster cannot be joined, or a plan does not fit it; nothing was started.
        KeyboardInterrupt: SIGINT or SIGTERM came while Ray was starting, and nothing was started; or a second SIGINT
            came during a run.
        SystemExit: a second SIGTERM came during a run.
    """
    results: list[RunResult] = []
    started_at = process_started_at() if owns_process else time.time()
    with StopSignals(owns_process=owns_process) as stop, _ray(candidates, sweep) as (nodes, planned):
        if candidates[0].config.plan:
            return _print_plans(planned, nodes, stop)
        stop.exit_at_once = False
        if stop.received is not None:
            raise KeyboardInterrupt
        resumed = [c.resume.run_dir for c in candidates if c.resume is not None]
        recover_orphans(output_dir(candidates[0].config), resumed=resumed)
        if sweep is not None:
            sweep.begin([candidate.overrides for candidate, _ in planned], candidates[0].config.tracking)
        for candidate, sizes in planned:
            run = functools.partial(_choose_and_run, candidate, sizes, nodes, stop, started_at=started_at)
            result = run(sweep=None) if sweep is None else sweep.run(candidate.overrides, run)
            started_at = time.time()
            results += [] if result is None else [result]
            if result is not None and result.status == "KILLED":
                break
    return results


def _print_plans(
    planned: Sequence[tuple[Candidate, Sizes]], nodes: tuple[Node, ...], stop: StopSignals
) -> list[RunResult]:
    """Print the plan of each run; with ``strategy=auto``, that of the best prediction.

    Returns:
        The run that should have measured a job, if it did not finish.
    """
    for candidate, sizes in planned:
        if candidate.is_auto:
            try:
                decision = _chooser(candidate, sizes.initial, nodes, stop).choose(measure=False)
            except NotMeasuredError as e:
                return [e.result]
            print(decision.text)
            sizes = decision.sizes
        print(plan_table(sizes.initial, nodes))
    return []


def _chooser(candidate: Candidate, plan: Plan, nodes: tuple[Node, ...], stop: StopSignals) -> Chooser:
    """Return what chooses the strategy of ``candidate``; ``plan`` is that of the run which measures the job."""
    from orchestrator.driver.auto import Chooser  # imports every strategy, which takes seconds

    def run(config: Config, plan: Plan, job: Job, show_failure: bool) -> RunResult:
        errors: list[str] = []
        given = pickle_job(job, job, errors)
        if given is None:
            raise ConfigError(errors)
        brief = replace(candidate, config=config, job=job, given=given, resume=None, warnings=())
        console = FailureSink(make_console(steps=plan.steps, world_size=plan.world_size) if show_failure else None)
        return _run(brief, Sizes((plan,), plan), stop, sweep=None, started_at=time.time(), console=console)

    embedded = cluster.target_address(candidate.config.cluster) is None
    return Chooser(candidate.config, candidate.job, plan, nodes, run, oversubscribe_cpus=embedded)


def _chosen(candidate: Candidate, plan: Plan, nodes: tuple[Node, ...], stop: StopSignals) -> tuple[Candidate, Sizes]:
    """Choose the strategy, show why, and return the run that trains with it. Raises like :meth:`Chooser.choose`."""
    decision = _chooser(candidate, plan, nodes, stop).choose()
    print(decision.text, flush=True)
    overrides = _with_choice(candidate.overrides, candidate.config, decision.overrides)
    return replace(candidate, overrides=overrides, config=decision.config, decision=decision), decision.sizes


def _with_choice(overrides: Sequence[str], config: Config, chosen: Sequence[str]) -> tuple[str, ...]:
    """Return the overrides of a run with ``strategy=auto`` that has made its choice; it keeps its name."""
    name = () if config.name is not None else (f"name={quote_text(config.run_name)}",)
    return (*with_strategy(overrides, chosen), *name)


def _choose_and_run(
    candidate: Candidate,
    sizes: Sizes,
    nodes: tuple[Node, ...],
    stop: StopSignals,
    *,
    sweep: Mapping[str, str] | None,
    started_at: float,
) -> RunResult:
    """Execute one run, whose strategy is chosen first if it is ``auto``. Raises like :func:`_run`."""
    try:
        if candidate.is_auto:
            candidate, sizes = _chosen(candidate, sizes.initial, nodes, stop)
        return _run(candidate, sizes, stop, sweep=sweep, started_at=started_at)
    except NotMeasuredError as e:
        return e.result


@contextlib.contextmanager
def _ray(
    candidates: Sequence[Candidate], sweep: Sweep | None
) -> Iterator[tuple[tuple[Node, ...], list[tuple[Candidate, Sizes]]]]:
    """Connect to one Ray for all runs; yields its nodes, and the runs with their sizes on them.

    Without a cluster, a Ray is embedded; not for ``plan=true``, which needs none.
    """
    config = candidates[0].config
    address = cluster.target_address(config.cluster)
    if address is not None:
        with cluster.connected(address):
            nodes = cluster.nodes()
            yield nodes, _planned(candidates, nodes, sweep)
        return
    machine = _this_machine()
    planned = [(c, c.sizes) for c in candidates if c.sizes is not None]
    if config.plan and not any(c.is_auto for c in candidates):
        yield (machine,), planned
        return
    # No more than the runs need: Ray starts a process in advance for each CPU, and each of them imports torch.
    num_cpus = max(s.max_processes * s.largest.cpus_per_worker for _, s in planned)
    with cluster.embedded(config.cluster, num_cpus=num_cpus, num_gpus=machine.gpus):
        yield (machine,), planned


def _planned(
    candidates: Sequence[Candidate], nodes: tuple[Node, ...], sweep: Sweep | None
) -> list[tuple[Candidate, Sizes]]:
    """Plan every run on the nodes of a cluster.

    Raises:
        ConfigError: some runs do not fit them, and are not left out of a sweep.
    """
    errors: list[str] = []
    planned: list[tuple[Candidate, Sizes]] = []
    for candidate in candidates:
        run_errors: list[str] = []
        sizes = _sizes(candidate.config, candidate.job, nodes, run_errors, oversubscribe_cpus=False)
        if sizes is not None and not run_errors:
            planned.append((candidate, sizes))
        elif sweep is None or not sweep.leaves_out(candidate.overrides, run_errors):
            errors += run_errors
    if sweep is not None and not planned:
        errors += sweep.errors
    if errors:
        raise ConfigError(errors)
    return planned


def _run(
    candidate: Candidate,
    sizes: Sizes,
    stop: StopSignals,
    *,
    sweep: Mapping[str, str] | None,
    started_at: float,
    console: Sink | None = None,
) -> RunResult:
    """Execute one run, from its directory and records to the verdict, on ``console`` or on the usual one.

    Raises:
        ConfigError: the run directory cannot be written, or another process drives the run.
        KeyboardInterrupt, SystemExit: see :class:`StopSignals`.
    """
    config, resume, plan, redactor = candidate.config, candidate.resume, sizes.initial, candidate.redactor
    as_job = candidate.given.display if candidate.given is not None else ""
    command = command_line(candidate.overrides, redactor, job=as_job)
    run_dir, uid = open_run(config, candidate.job, plan, resume, command=command, sweep=sweep, redactor=redactor)
    if candidate.decision is not None:
        candidate.decision.write_to(run_dir)
    lease = Lease(run_dir)
    records = RecordUpload(run_dir, lease, config.storage, redactor)
    shown = console or make_console(steps=plan.steps, world_size=plan.world_size)
    console = RedactingSink(shown, redactor)
    stop.console = console
    writer = Journal(run_dir, warnings=console)
    journal = RedactingSink(writer, redactor)
    spec = RunSpec(
        config=config,
        sizes=sizes,
        run_dir=run_dir,
        run_uid=uid,
        checkpoint=None if resume is None else resume.checkpoint,
        resumed_from_step=None if resume is None else resume.step,
        started_at=started_at,
        tokens_per_sample=candidate.job.tokens_per_sample,
        secrets=tuple(redactor.secrets),
        pickled_job=None if candidate.given is None else candidate.given.data,
    )
    uploader = Uploader.start(run_dir, config.tracking, redactor.secrets)
    ending = RunEnding(
        plan=plan,
        run_dir=run_dir,
        tracking=config.tracking,
        uploader=uploader,
        records=records,
        journal=journal,
        console=console,
        redactor=redactor,
        resume_command=command_line((*candidate.overrides, f"resume={run_dir.location}"), redactor, job=as_job),
    )
    ended = functools.partial(RunResult, run_dir=run_dir.path, url=run_dir.url)
    try:
        for warning in candidate.warnings:
            console.emit(Warned(message=warning))
        try:
            with lease, StopRequests(run_dir, stop):
                result = Run(spec, EventStream([journal, console]), stop, uploader, records, lease).execute()
        except SupersededError as e:
            # The directory belongs to the other driver now: write nothing more to it.
            writer.discard()
            uploader.leave()
            console.emit(RunEnded(status="FAILED", exit_code=1, reason=str(e), summary={}))
            return ended(status="FAILED", exit_code=1, reason=str(e))
        except (KeyboardInterrupt, SystemExit):
            number = stop.received or signal.SIGINT
            reason, exit_code = f"stopped by a second {number.name}", 128 + int(number)
            ending.finish(ended(status="KILLED", exit_code=exit_code, reason=reason))
            raise
        except Exception as e:
            # A bug in the orchestrator; the records still say that the run failed.
            reason = f"{type(e).__name__}: {e}"
            ending.finish(ended(status="FAILED", exit_code=1, reason=reason))
            raise
        with stop.raising():
            return ending.finish(result)
    finally:
        journal.close()
        console.close()

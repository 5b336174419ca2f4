"""The checks of all runs of a command before the first one starts, and their plans."""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from orchestrator.config.arguments import field_values, too_large
from orchestrator.config.build import ConfigError, collect_errors
from orchestrator.config.compose import compose, placed
from orchestrator.config.eval_splits import unknown_split
from orchestrator.config.files import Files
from orchestrator.config.job_loader import is_importable, load_callbacks, load_job
from orchestrator.config.overrides import choosing, quote_text, values, with_strategy
from orchestrator.config.recorded_config import to_dict
from orchestrator.config.redact import Redactor
from orchestrator.config.schema import Config
from orchestrator.driver.choosing import Choice, chooser
from orchestrator.driver.code import shipped_code
from orchestrator.driver.code.worker_code import PickledJob, job_override, pickle_job, worker_variables
from orchestrator.driver.loops import Loop
from orchestrator.driver.nodes.node_reports import with_memory_here
from orchestrator.driver.preflight.child_checks import plan_sizes
from orchestrator.driver.preflight.debugging import ALONE, in_one_process, note_of, with_one_rank
from orchestrator.driver.preflight.epochs import few_evaluations, in_steps
from orchestrator.driver.preflight.resume import Resume, find_resume, find_source
from orchestrator.driver.preflight.run_config import absolute_paths, environment_errors, plain_fields
from orchestrator.driver.process import cluster
from orchestrator.driver.process.uploads import unmet_keys
from orchestrator.job import Job
from orchestrator.planning.plan import Node
from orchestrator.policy.elastic import Sizes
from orchestrator.strategies import registry
from orchestrator.strategies.external.job import Script


@dataclass(frozen=True, kw_only=True)
class CheckedRun:
    """A run that passed every check.

    Attributes:
        resume: the run to continue; None for a new one.
        seen: the directories of the runs that were searched for one to continue.
        sizes: None until the cluster is joined, if its nodes decide.
        choice: how the strategy was chosen; None if it was given.
        source: another run, whose checkpoint this one begins with; None if there is none.
        notes: remarks for the user.
    """

    overrides: tuple[str, ...]
    config: Config
    job: Job
    resume: Resume | None
    seen: frozenset[str]
    sizes: Sizes | None
    warnings: tuple[str, ...]
    redactor: Redactor
    given: PickledJob | None
    choice: Choice | None = None
    source: Resume | None = None
    notes: tuple[str, ...] = ()

    @property
    def scripts(self) -> frozenset[Path]:
        """The files that the workers run in processes of their own."""
        if isinstance(self.job, Script) and self.job.kind == "file":
            return frozenset([Path(self.job.script)])
        return frozenset()

    @property
    def embeds_ray(self) -> bool:
        """Whether the command starts a Ray of its own, whose CPUs are only shares of this machine."""
        return self.sizes is not None

    @property
    def max_cpus(self) -> float:
        """The most CPUs of the run, and of those that measure for a choice, on a Ray of its own."""
        assert self.sizes is not None
        options, largest = self.config.strategy, self.sizes.largest
        extra = registry.load(options.name).extra_processes(options, largest.world_size)
        return (self.sizes.max_processes + extra) * largest.cpus_per_worker


def check_all(
    runs: Sequence[Sequence[str]],
    redactor: Redactor | None = None,
    job: Job | type[Job] | None = None,
    loop: Loop | None = None,
) -> list[CheckedRun]:
    """Check all runs, each given by its overrides, before the first one starts.

    Args:
        runs: the overrides of each run.
        redactor: learns the secrets of all runs; None to use a new one.
        job: the job of all runs, if it is given as an object.
        loop: executes the runs, and may leave out those with errors.

    Raises:
        ConfigError: with the errors of all of them.
    """
    redactor = redactor or Redactor.of_process()
    address_error = functools.cache(cluster.address_error)
    checked_runs: list[CheckedRun] = []
    errors: list[str] = []
    for overrides in runs:
        run_errors: list[str] = []
        checked_run = _check(overrides, address_error, run_errors, redactor, job)
        run_errors = list(dict.fromkeys(redactor.text(error) for error in placed(overrides, run_errors)))
        if loop is not None and run_errors and loop.leaves_out(overrides, run_errors):
            continue
        errors += run_errors
        if checked_run is not None:
            checked_runs.append(checked_run)
    if loop is not None and not checked_runs:
        errors += loop.errors
    if errors:
        raise ConfigError(errors)
    return checked_runs


def planned_on(
    nodes: tuple[Node, ...], checked_runs: Sequence[CheckedRun], loop: Loop | None
) -> list[tuple[CheckedRun, Sizes]]:
    """Plan every run on the nodes of a cluster.

    Raises:
        ConfigError: some runs do not fit them, and are not left out.
    """
    errors: list[str] = []
    planned: list[tuple[CheckedRun, Sizes]] = []
    for checked_run in checked_runs:
        run_errors: list[str] = []
        sizes = plan_sizes(checked_run.config, checked_run.job, nodes, run_errors, oversubscribe_cpus=False)
        if sizes is not None and not run_errors:
            planned.append((checked_run, sizes))
        elif loop is None or not loop.leaves_out(checked_run.overrides, run_errors):
            errors += run_errors
    if loop is not None and not planned:
        errors += loop.errors
    if errors:
        raise ConfigError(errors)
    return planned


def this_machine() -> Node:
    """Return this machine as the only node of an embedded Ray."""
    cores, gpus = len(os.sched_getaffinity(0)), torch.cuda.device_count()
    gpu_name = torch.cuda.get_device_name(0) if gpus else ""
    here = Node(node_id="local", name=socket.gethostname(), cpus=cores, gpus=gpus, gpu_name=gpu_name)
    return with_memory_here(here, os.environ)


def with_choice(overrides: Sequence[str], config: Config, chosen: Sequence[str]) -> tuple[str, ...]:
    """Return the overrides of a run with the strategy that was chosen for it; it keeps its name."""
    found = config.name is None and config.resume not in ("never", "auto")  # by another name than its own, maybe
    name = () if found or "name" in values(overrides) else (f"name={quote_text(config.run_name)}",)
    return (*with_strategy(overrides, chosen), *name)


def _check(
    overrides: Sequence[str],
    address_error: Callable[[str], str | None],
    errors: list[str],
    redactor: Redactor,
    job_argument: Job | type[Job] | None,
) -> CheckedRun | None:
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
        with collect_errors(errors):
            shipped_code.install(config.cluster)
    warnings = Files.of(overrides).notes()
    job = load_job(job_spec, errors, redactor, job_argument, noticed=warnings) if job_spec is not None else None
    if config is not None:
        load_callbacks(config.callbacks, errors, redactor)
    if job is not None and (large := too_large(field_values(job))):
        errors += large
        return None  # whatever else is checked copies the fields
    pickled = None if job_argument is None or job is None else pickle_job(job_argument, job, errors)
    if config is not None and job is not None and isinstance(job_argument, Job):
        config = replace(config, job=replace(config.job, fields=plain_fields(job)))
    paths = config or _paths_config(overrides)
    if paths is not None:
        errors += [*unmet_keys(values(overrides)), *environment_errors(absolute_paths(paths))]
    if config is None:
        return None
    config = absolute_paths(config)
    asked = config.strategy.name
    if config.debug:
        config = in_one_process(config)
        alone = config if asked == ALONE else _with_one_rank(config)
        if alone is None:
            instead = with_choice(typed, config, [f"strategy={ALONE}"])
            checked_run = _check(instead, address_error, errors, redactor, job_argument)
            return checked_run and replace(checked_run, notes=(note_of(checked_run.config, asked=asked),))
        config = alone
    if job is not None:
        with collect_errors(errors):
            config = in_steps(config, job)
    with collect_errors(errors):
        worker_variables(config.cluster.env, os.environ)
    with collect_errors(errors):
        shipped_code.module_paths(config.cluster.py_modules)
    resume, source, sizes = None, None, None
    seen: set[str] = set()
    tried = None if config.debug else job  # in child processes, where nothing can be debugged
    with collect_errors(errors):
        resume = find_resume(config, tried, warnings=warnings, redactor=redactor, seen=seen, words=typed)
    if resume is not None and (kept := resume.run_dir.read_record().get("name")) is not None:
        config = replace(config, name=str(kept))
    if resume is not None and config.strategy.is_choice:
        if (chosen := chooser().chosen_before(resume.run_dir)) is None:
            reason = f"strategy={config.strategy.name} did not choose its strategy; give strategy=<name>"
            errors.append(f"resume={config.resume}: {reason}")
            return None
        return _check(with_choice(typed, config, chosen), address_error, errors, redactor, job_argument)
    if resume is not None:
        config = replace(config, train=resume.train)
    else:
        with collect_errors(errors):
            source = find_source(config, tried, warnings=warnings, redactor=redactor, words=typed)
    if registry.load(config.strategy.name).runs_script:  # neither of which anything here knows
        config = replace(config, tracking=replace(config.tracking, log_model=False, log_dataset=False))
    if source is not None and config.evaluate is not None:
        tracking = replace(config.tracking, log_model=False, log_dataset=False)
        config = replace(config, train=source.train, tracking=tracking)
        if config.strategy.is_choice:
            errors.append(f"strategy={asked}: it measures training; choose another strategy for evaluate")
    if job is not None and (wrong := unknown_split(config.train.eval_splits, job.split_names)) is not None:
        errors.append(wrong)
    address = None if config.debug else cluster.target_address(config.cluster)
    if address is None:
        if config.sweep.unfit == "skip":
            plan_sizes(config, None, (this_machine(),), errors, oversubscribe_cpus=False)
        sizes = plan_sizes(config, tried, (this_machine(),), errors, oversubscribe_cpus=True)
        if config.sweep.parallel not in (1, "auto"):
            errors.append(
                f"sweep.parallel={config.sweep.parallel}: an embedded Ray has room for one run; start Ray with "
                "`ray start --head` and add cluster=auto, or set it to 1"
            )
    elif error := address_error(address):
        errors.append(error)
    if job is None:
        return None
    return CheckedRun(
        overrides=typed,
        config=config,
        job=job,
        resume=resume,
        seen=frozenset(seen),
        sizes=sizes,
        warnings=tuple(warnings),
        redactor=redactor,
        given=pickled,
        source=source,
        notes=tuple(filter(None, (note_of(config, asked=asked) if config.debug else None, few_evaluations(config)))),
    )


def _with_one_rank(config: Config) -> Config | None:
    """Return ``config`` for one rank on this machine; None if its strategy has no such layout, or none of its own."""
    here = (this_machine(),)

    def plan(config: Config, errors: list[str]) -> Sizes | None:
        return plan_sizes(config, None, here, errors, oversubscribe_cpus=True)

    return None if config.strategy.is_choice else with_one_rank(config, plan)


def _paths_config(overrides: Sequence[str]) -> Config | None:
    """Compose only the overrides that say where results go; None if these have errors too."""
    config, _ = compose(choosing(overrides, "output_dir", "storage.", "tracking."), [], registry.config_class)
    return config


def with_shared_cores(config: Config, *, processes_per_core: float) -> Config:
    """Return ``config`` with as much more time to start as there are processes of the run for each core.

    The processes import the same libraries at the same time, so each takes as many times longer as share its core.
    """
    factor = max(1.0, processes_per_core)
    cluster = config.cluster
    return replace(
        config,
        cluster=replace(
            cluster,
            start_timeout_s=factor * cluster.start_timeout_s,
            rendezvous_timeout_s=factor * cluster.rendezvous_timeout_s,
        ),
    )

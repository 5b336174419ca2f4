"""The checks of all runs of a command before the first one starts, and their plans."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from orchestrator.config.build import ConfigError, collect_errors
from orchestrator.config.compose import compose, to_dict
from orchestrator.config.job_loader import is_importable, load_job
from orchestrator.config.overrides import quote_text, values, with_strategy
from orchestrator.config.redact import Redactor
from orchestrator.config.schema import Config
from orchestrator.driver import cluster, packages
from orchestrator.driver.decision import Decision, chosen_before
from orchestrator.driver.given_job import PickledJob, job_override, pickle_job
from orchestrator.driver.preflight.params import plain_fields
from orchestrator.driver.preflight.paths import absolute_paths, environment_errors
from orchestrator.driver.preflight.resume import Resume, find_resume
from orchestrator.driver.sweep import Sweep
from orchestrator.driver.worker_variables import worker_variables
from orchestrator.job import Job
from orchestrator.planning.plan import Node, Plan, make_plan
from orchestrator.policy.elastic import Sizes
from orchestrator.strategies import registry

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


def planned_on(
    nodes: tuple[Node, ...], candidates: Sequence[Candidate], sweep: Sweep | None
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


def this_machine() -> Node:
    """Return this machine as the only node of an embedded Ray."""
    return cluster.this_machine(torch.cuda.device_count())


def with_choice(overrides: Sequence[str], config: Config, chosen: Sequence[str]) -> tuple[str, ...]:
    """Return the overrides of a run with ``strategy=auto`` that has made its choice; it keeps its name."""
    name = () if config.name is not None else (f"name={quote_text(config.run_name)}",)
    return (*with_strategy(overrides, chosen), *name)


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
        with collect_errors(errors):
            packages.install(config.cluster)
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
    with collect_errors(errors):
        packages.module_paths(config.cluster.py_modules)
    warnings: list[str] = []
    resume, sizes = None, None
    with collect_errors(errors):
        resume = find_resume(config, job, warnings=warnings, redactor=redactor)
    if resume is not None and config.strategy.name == AUTO:
        if (chosen := chosen_before(resume.run_dir)) is None:
            errors.append(f"resume={config.resume}: strategy=auto did not choose its strategy; give strategy=<name>")
            return None
        return _check(with_choice(typed, config, chosen), address_error, errors, redactor, job_argument)
    address = cluster.target_address(config.cluster)
    if address is None:
        if config.sweep.unfit == "skip":
            _sizes(config, None, (this_machine(),), errors, oversubscribe_cpus=False)
        sizes = _sizes(config, job, (this_machine(),), errors, oversubscribe_cpus=True)
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

"""``strategy=auto`` on the driver: measure the job, predict all contenders, measure the best of them, and choose."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import math
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from orchestrator.compat.pipelining import computations
from orchestrator.config.build import ConfigError, build
from orchestrator.config.compose import compose
from orchestrator.config.redact import Redactor
from orchestrator.config.schema import Config
from orchestrator.driver.auto.brief_runs import remove_run, shortened, without_samples
from orchestrator.driver.auto.decision import Decision, NotMeasuredError
from orchestrator.driver.preflight.child_checks import check_job
from orchestrator.driver.preflight.child_process import ChildDiedError, in_child
from orchestrator.driver.preflight.run_config import output_dir, plain_fields
from orchestrator.driver.process.run_context import RunResult
from orchestrator.job import Job, has_training_step
from orchestrator.planning.plan import Node, Plan, make_plan
from orchestrator.planning.schedules import PipelineLayout
from orchestrator.records.json_file import read_json, write_json
from orchestrator.records.lock import processor
from orchestrator.records.output_dir import staged_run
from orchestrator.state.checkpoint_store import CheckpointStore
from orchestrator.state.manifest import CheckpointError, read_manifest
from orchestrator.strategies import registry
from orchestrator.strategies.checks.traced_job import TracedJob
from orchestrator.strategies.constructor import Outline
from orchestrator.strategies.keys import AutoConfig
from orchestrator.strategies.tuned.auto import PROFILE_KEY, PROFILE_STEPS
from orchestrator.timeline import Action
from orchestrator.tuning.choice import Contender, best, next_to_measure, proposals, stage_counts
from orchestrator.tuning.predict import DividedSamples, memory_error, predict
from orchestrator.tuning.profile import Profile

FOLDER = "auto"
"""The directory below ``output_dir`` with the profiles, the past errors, and the runs that measure."""
WARM_UP = 1.25
"""A run has this many times the steps that are to be measured, because the first fifth does not count."""

QuietRun = Callable[[Config, Plan, Job, bool], RunResult]
"""Executes a run without a console. The last argument says whether to show why it failed."""
_KEPT = 20
"""The errors of a candidate that are kept, the newest."""


class Chooser:
    """Chooses the strategy of one run."""

    def __init__(
        self,
        config: Config,
        job: Job,
        plan: Plan,
        nodes: tuple[Node, ...],
        run: QuietRun,
        *,
        redactor: Redactor,
        oversubscribe_cpus: bool,
    ):
        """Prepare a choice.

        Args:
            config: the configuration of the run, with ``strategy=auto``.
            plan: the plan of the run which measures the job, on as many workers as the strategy may use.
            nodes: the nodes of the cluster.
            run: executes the runs that measure.
            redactor: masks secrets in the reasons of refusals.
            oversubscribe_cpus: see :func:`make_plan`.
        """
        assert isinstance(config.strategy, AutoConfig)
        self._config = config
        self._options = config.strategy
        self._job = job
        self._plan = plan
        self._nodes = nodes
        self._run = run
        self._redactor = redactor
        self._oversubscribe_cpus = oversubscribe_cpus
        self._plans: dict[tuple[str, ...], tuple[Config, Plan]] = {}
        self._folder = output_dir(config).path / FOLDER
        self._errors_file = self._folder / f"errors-{hardware_key(plan, nodes)}.json"

    def choose(self, *, measure: bool = True) -> Decision:
        """Predict all contenders, measure the best of them if ``measure``, and return the best.

        Raises:
            NotMeasuredError: the job could not be measured, or a signal came.
            ConfigError: no strategy can train the job here; nothing else was started.
        """
        began = time.monotonic()
        contenders = self._predicted(self.contenders())
        planned = time.monotonic()
        options = self._options
        while measure and (index := next_to_measure(contenders, options.measured)) is not None:
            contenders[index] = self._measured(contenders[index], steps=options.measured_steps)
        add_errors(self._errors_file, contenders)
        winner = best(contenders)
        if winner is None:
            raise ConfigError([f"strategy=auto: no strategy fits; {c.name}: {c.refused}" for c in contenders])
        config, plan = self._plans[winner.overrides]
        return Decision(
            overrides=winner.overrides,
            config=config,
            plan=plan,
            contenders=tuple(contenders),
            planning_s=planned - began,
            measuring_s=time.monotonic() - planned,
        )

    def contenders(self) -> list[Contender]:
        """Plan all proposals; those that cannot be are refused."""
        options = self._options
        return [
            self._planned(overrides)
            for overrides in proposals(self._plan.world_size, options.candidates, options.schedules)
        ]

    def _predicted(self, contenders: list[Contender]) -> list[Contender]:
        """Return the contenders with their predictions, for which the job is measured unless it has been before."""
        if has_training_step(self._job) or all(c.refused for c in contenders):
            return contenders
        profile = self._profile()
        errors = read_errors(self._errors_file)
        divided = self._divided_samples([c for c in contenders if not c.refused])
        predicted = [c if c.refused else self._with_prediction(c, profile, divided.get(c.name)) for c in contenders]
        return [replace(c, past_errors=tuple(errors.get(c.name, ()))) for c in predicted]

    def _measured(self, contender: Contender, *, steps: int) -> Contender:
        """Return ``contender`` with the median time of ``steps`` steps, or refused if its run failed.

        Raises:
            NotMeasuredError: a signal stopped the run.
        """
        config, plan = self._plans[contender.overrides]
        total = math.ceil(steps * WARM_UP)
        result = self._run_briefly(config, plan, steps=total, log_every=min(total, config.train.log_every))
        if result.status == "KILLED":
            raise NotMeasuredError(result)
        if result.status != "FINISHED":
            return replace(contender, refused=f"it failed: {result.reason}")
        return replace(contender, measured_ms=float(result.summary["step_ms_p50"]))

    def _planned(self, overrides: tuple[str, ...]) -> Contender:
        """Plan a proposal, and check the job for it."""
        errors: list[str] = []
        world_size = 0
        composed, _ = compose(overrides, errors, registry.config_class)
        if composed is not None:
            config = replace(self._config, strategy=composed.strategy, name=self._config.run_name)
            rules = registry.load(composed.strategy.name)
            try:
                plan = make_plan(config, rules, self._nodes, oversubscribe_cpus=self._oversubscribe_cpus)
                world_size = plan.world_size
                if plan.device != self._plan.device:
                    errors.append(f"{rules.cpu_only}; the job was measured on GPUs")
                notes = check_job(rules, config, self._job, plan, errors)
                self._plans[overrides] = (config, replace(plan, notes=(*plan.notes, *notes)))
            except ConfigError as e:
                errors += e.errors
            except Exception as e:  # whatever the model raises, another strategy may be able to train it
                errors.append(f"{type(e).__name__}: {e}")
        return Contender(overrides=overrides, world_size=world_size, refused=self._redactor.text("; ".join(errors)))

    def _divided_samples(self, contenders: Sequence[Contender]) -> Mapping[str, DividedSamples | str]:
        """Return what is known of the layouts in which workers compute a sample together, or why it is unknown."""
        plans = {c.name: self._plans[c.overrides] for c in contenders}
        plans = {name: (config, plan) for name, (config, plan) in plans.items() if plan.mesh.workers_per_sample > 1}
        if not plans:
            return {}

        def forecasts() -> dict[str, DividedSamples | str]:
            job = TracedJob(self._config, self._job, on_gpus=self._plan.device == "cuda")
            found: dict[str, DividedSamples | str] = {}
            for name, (config, plan) in plans.items():
                forecast = job.forecast(config, plan)
                assert forecast.memory is not None
                found[name] = DividedSamples(work=job.work, step=forecast.step, memory=forecast.memory)
            return found

        try:
            return in_child(forecasts, timeout_s=self._config.recovery.build_max_s)
        except (ChildDiedError, ConfigError) as e:
            return dict.fromkeys(plans, str(e))

    def _with_prediction(
        self, contender: Contender, profile: Profile, divided: DividedSamples | str | None
    ) -> Contender:
        _, plan = self._plans[contender.overrides]
        if plan.pipeline is not None and (why := profile.division(plan.pipeline.num_stages).refused):
            return replace(contender, refused=self._redactor.text(why))
        if isinstance(divided, str):
            return replace(contender, refused=self._redactor.text(divided))
        prediction = predict(profile, plan, _orders, divided)
        error = memory_error(profile, plan, prediction, num_nodes=len(self._nodes))
        return replace(contender, prediction=prediction, refused=error or "")

    def _profile(self) -> Profile:
        """Return the profile of an earlier run, or measure the job."""
        key = profile_key(self._config, self._job, self._plan, self._nodes)
        file = self._folder / f"profile-{key}.json"
        if self._options.profile == "reuse" and (saved := _read(file)) is not None:
            where = self._redactor.text(str(file))
            print(f"auto uses the measurements in {where}; strategy.profile=fresh makes new ones", flush=True)
            return saved
        result = self._run_briefly(self._config, self._plan, steps=PROFILE_STEPS, log_every=PROFILE_STEPS, keep=True)
        if result.status != "FINISHED":
            raise NotMeasuredError(result)
        data = _measurements(result)
        errors: list[str] = []
        profile = build(Profile, data, "", errors)
        assert profile is not None, errors
        self._folder.mkdir(parents=True, exist_ok=True)
        write_json(file, data)
        remove_run(result)
        return profile

    def _run_briefly(self, config: Config, plan: Plan, *, steps: int, log_every: int, keep: bool = False) -> RunResult:
        """Execute a run of a few steps, without evaluations; ``keep`` its directory although it finishes."""
        brief, brief_plan = shortened(config, plan, steps=steps, log_every=log_every, folder=FOLDER)
        result = self._run(brief, brief_plan, without_samples(self._job), keep)
        if result.status == "FINISHED" and not keep:
            remove_run(result)
        return result


def _measurements(result: RunResult) -> Mapping[str, Any]:
    """Return the data of the profile, which is in the checkpoint of the run that has measured the job.

    Raises:
        ConfigError: they cannot be read.
    """
    damaged: list[CheckpointError] = []
    try:
        run_dir = staged_run(result.run_dir)
        checkpoint = CheckpointStore(run_dir.checkpoints, run_dir.remote_checkpoints).find_newest(damaged.append)
        if checkpoint is None:
            raise ValueError("; ".join(map(str, damaged)) or f"{run_dir.location} has no checkpoint")
        data: Mapping[str, Any] = read_manifest(checkpoint)["meta"][PROFILE_KEY]
    except (OSError, ValueError) as e:
        raise ConfigError([f"strategy=auto: the measurements cannot be read: {e}"]) from e
    return data


def _orders(layout: PipelineLayout) -> list[list[Action]]:
    workers = max(layout.stage_ranks) + 1
    return computations(layout.schedule, workers, layout.num_microbatches, layout.num_stages // workers)


def _read(file: Path) -> Profile | None:
    """Return the profile in a file; None if there is none, or one of another version of this program."""
    try:
        data = read_json(file)
    except ValueError:
        return None
    return build(Profile, data, "", []) if data else None


def read_errors(file: Path) -> Mapping[str, list[float]]:
    """Return the relative errors by the name of the candidate, the oldest first; none from a damaged file."""
    try:
        return read_json(file)
    except ValueError:
        return {}


def add_errors(file: Path, contenders: Iterable[Contender]) -> None:
    """Add the errors of the contenders that were predicted and measured."""
    before = read_errors(file)
    new = {c.name: [*before.get(c.name, []), c.error][-_KEPT:] for c in contenders if c.error is not None}
    if new:
        write_json(file, {**before, **new})


def profile_key(config: Config, job: Job, plan: Plan, nodes: Sequence[Node]) -> str:
    """Return the key of the profile of ``job``, which another run may use if it has the same one.

    Args:
        config: the configuration, with ``strategy=auto``.
        plan: the plan of the run which measures.
        nodes: the nodes of the cluster.
    """
    assert isinstance(config.strategy, AutoConfig)
    return _digest(
        config.job.target,
        plain_fields(job),
        _code_of(type(job)),
        _shape_of(Outline(job, config.train), timeout_s=config.recovery.build_max_s),
        dataclasses.asdict(config.train.only_training(steps=1, log_every=1)),
        plan.world_size,
        plan.threads_per_worker,
        plan.device,
        stage_counts(plan.world_size, config.strategy.schedules),
        config.strategy.with_servers,
        config.strategy.with_parts,
        config.strategy.with_pipelines,
        config.strategy.with_devices,
        *_hardware(nodes),
        torch.__version__,
    )


def hardware_key(plan: Plan, nodes: Sequence[Node]) -> str:
    """Return the key of the hardware on which a run with ``plan`` measures."""
    return _digest(plan.device, *_hardware(nodes))


def _digest(*facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _hardware(nodes: Sequence[Node]) -> tuple[Any, ...]:
    # The driver does not know the model of a GPU, so that nodes with GPUs are told apart by name.
    sizes = sorted((node.cpus, node.gpus, node.name if node.gpus else "") for node in nodes)
    return sizes, platform.machine(), processor()


def _code_of(cls: type) -> list[str]:
    """Return the source of a job's class and of its bases below :class:`Job`, but for classes typed at a terminal."""
    sources = []
    for base in cls.__mro__[: cls.__mro__.index(Job)]:
        try:
            sources.append(inspect.getsource(base))
        except (OSError, TypeError):
            continue
    return sources


def _shape_of(outline: Outline, *, timeout_s: float) -> list[str]:
    """Return the modules of the model with the shapes of their tensors; nothing if they are unknown."""

    def shape() -> list[str]:
        if (model := outline.model) is None:
            return []
        return [repr(model), *(f"{name} {tuple(t.shape)} {t.dtype}" for name, t in model.state_dict().items())]

    try:
        return in_child(shape, timeout_s=timeout_s)
    except ChildDiedError:
        return []

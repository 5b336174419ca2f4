"""``strategy=auto``: predict the layouts of a job on the nodes that are here, measure the best of them, and choose."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import math
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from orchestrator.config.build import ConfigError
from orchestrator.config.compose import compose
from orchestrator.config.redact import Redactor
from orchestrator.config.schema import Config
from orchestrator.display.plain_text import count
from orchestrator.driver.brief_runs import remove_run, shortened, without_samples
from orchestrator.driver.choosing import NotMeasuredError, QuietRun
from orchestrator.driver.preflight.child_checks import check_job, with_samples
from orchestrator.driver.preflight.child_process import ChildDiedError, in_child
from orchestrator.driver.preflight.run_config import output_dir, plain_fields
from orchestrator.driver.process.run_context import RunResult
from orchestrator.features.auto.candidates import Here, untraced
from orchestrator.features.auto.choice import Contender, best, next_to_measure, refusals
from orchestrator.features.auto.decision import Decision
from orchestrator.features.auto.strategies import AutoConfig
from orchestrator.features.plan.prediction.correction import correction
from orchestrator.features.plan.prediction.cost import StepTime
from orchestrator.job import Job, has_training_step
from orchestrator.planning.plan import Node, Plan, make_plan
from orchestrator.records.json_file import read_json, write_json
from orchestrator.records.lock import processor
from orchestrator.strategies import registry
from orchestrator.strategies.constructor import Outline

FOLDER = "auto"
"""The directory below ``output_dir`` with the measured times, and the runs that measure."""
WARM_UP = 1.25
"""A run has this many times the steps that are to be measured, because the first fifth does not count."""

CORRECTING = 3
"""The measurements that correct the predictions of all others."""


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
            plan: on as many workers as the strategy may use.
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
        self._times: dict[tuple[str, ...], StepTime] = {}
        self._folder = output_dir(config).path / FOLDER
        self._times_file = self._folder / f"times-{times_key(config, job, plan, nodes)}.json"

    def choose(self, *, measure: bool = True) -> Decision:
        """Predict all layouts, measure the best of them if ``measure``, and return the best.

        Raises:
            NotMeasuredError: a signal came.
            ConfigError: no strategy can train the job here; nothing else was started.
        """
        began = time.monotonic()
        known = self._known_times()
        contenders = [replace(c, measured_ms=known.get(c.name)) for c in self.contenders()]
        planned = time.monotonic()
        options, least = self._options, self._options.measured if measure else 0
        tested = [c for c in contenders if c.measured_ms is not None]
        while True:
            self._correct(contenders, tested[:CORRECTING])
            index, winner = next_to_measure(contenders, least), best(contenders)
            if index is None:
                if winner is None or winner.overrides in self._plans:
                    break
                index = contenders.index(winner)
            if contenders[index].overrides not in self._plans:
                contenders[index] = self._checked(contenders[index])
            if least and not contenders[index].refused and contenders[index].measured_ms is None:
                contenders[index] = self._measured(contenders[index], steps=options.measured_steps)
                tested += [c for c in contenders[index : index + 1] if c.measured_ms is not None]
        if winner is None:
            raise ConfigError([f"strategy=auto: no strategy fits; {text}" for text in refusals(contenders)])
        self._keep_times({**known, **{c.name: c.measured_ms for c in contenders if c.measured_ms is not None}})
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
        """Return all layouts with their predictions; those of a job that cannot be traced are checked instead."""
        if not has_training_step(self._job):
            try:
                return self._predicted()
            except (ChildDiedError, ConfigError) as e:
                print(f"auto measures every candidate: {self._redactor.text(str(e))}", flush=True)
        return [self._checked(contender) for contender in untraced(self._options, self._plan.world_size)]

    def _predicted(self) -> list[Contender]:
        """Return all layouts with their predictions. The model is traced in a child process, which it may end.

        Raises:
            ChildDiedError, ConfigError: it cannot be traced.
        """
        here = Here.measured(self._config, self._plan, self._nodes, shares_cores=self._oversubscribe_cpus)
        found = with_samples(self._config, self._job, lambda: here.candidates(self._job))
        self._times = {contender.overrides: step for contender, step in found if step is not None}
        return [contender for contender, _ in found]

    def _correct(self, contenders: list[Contender], tested: Sequence[Contender]) -> None:
        """Correct the predictions of contenders that are not measured by those that were ``tested``."""
        times = [(self._times.get(c.overrides), c.measured_ms) for c in tested]
        found = correction([(known, ms / 1e3) for known, ms in times if known is not None and ms is not None])
        for place, c in enumerate(contenders):
            if c.measured_ms is None and (known := self._times.get(c.overrides)) is not None:
                contenders[place] = replace(c, predicted_ms=1e3 * found.seconds(known))

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

    def _checked(self, contender: Contender) -> Contender:
        """Plan a contender, and check the job for it."""
        errors: list[str] = []
        world_size, overrides = contender.world_size, contender.overrides
        composed, _ = compose(overrides, errors, registry.config_class)
        if composed is not None:
            config = replace(self._config, strategy=composed.strategy, name=self._config.run_name)
            rules = registry.load(composed.strategy.name)
            try:
                plan = make_plan(config, rules, self._nodes, oversubscribe_cpus=self._oversubscribe_cpus)
                world_size = plan.world_size
                if plan.device != self._plan.device:
                    errors.append(f"{rules.cpu_only}; auto compares strategies on GPUs")
                notes = check_job(rules, config, self._job, plan, errors)
                self._plans[overrides] = (config, replace(plan, notes=(*plan.notes, *notes)))
            except ConfigError as e:
                errors += e.errors
            except Exception as e:  # whatever the model raises, another strategy may be able to train it
                errors.append(f"{type(e).__name__}: {e}")
        return replace(contender, world_size=world_size, refused=self._redactor.text("; ".join(errors)))

    def _known_times(self) -> Mapping[str, float]:
        """Return the step times that an earlier choice for the same job has measured here, by name."""
        if self._options.profile == "fresh":
            return {}
        try:
            found: Mapping[str, float] = read_json(self._times_file)
        except ValueError:
            return {}
        if found:
            where = self._redactor.text(str(self._times_file))
            print(f"auto uses the measurements in {where}; strategy.profile=fresh makes new ones", flush=True)
        return found

    def _keep_times(self, times: Mapping[str, float]) -> None:
        if times:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_json(self._times_file, times)

    def _run_briefly(self, config: Config, plan: Plan, *, steps: int, log_every: int) -> RunResult:
        """Execute a run of a few steps, without evaluations, and remove its directory if it finishes."""
        brief, brief_plan = shortened(config, plan, steps=steps, log_every=log_every, folder=FOLDER)
        print(f"auto measures strategy={plan.strategy} on {count(plan.world_size, 'worker')}", flush=True)
        result = self._run(brief, brief_plan, without_samples(self._job))
        if result.status == "FINISHED":
            remove_run(result)
        return result


def times_key(config: Config, job: Job, plan: Plan, nodes: Sequence[Node]) -> str:
    """Return the key of the step times of ``job``, which another run may use if it has the same one.

    Args:
        config: the configuration, with ``strategy=auto``.
        plan: of a run on as many workers as there may be.
        nodes: the nodes of the cluster.
    """
    return _digest(
        config.job.target,
        plain_fields(job),
        _code_of(type(job)),
        _shape_of(Outline(job, config.train), timeout_s=config.recovery.build_max_s),
        dataclasses.asdict(config.train.only_training(steps=1, log_every=1)),
        plan.world_size,
        plan.threads_per_worker,
        plan.device,
        *_hardware(nodes),
        torch.__version__,
    )


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

"""Checks of the job's model in a child process: of a plan for each size, and whether it can go on from a checkpoint.

What code of the job does to fake tensors can end its process. What the driver cannot know, such as data on a node, the
workers check.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn

from orchestrator.config.build import ConfigError, collect_errors
from orchestrator.config.schema import Config
from orchestrator.driver.preflight.child_process import ChildDiedError, beside_ray, in_child
from orchestrator.job import Job, has_training_step
from orchestrator.planning.capacity import cpus_for_data
from orchestrator.planning.layout import Layout
from orchestrator.planning.mesh import Mesh
from orchestrator.planning.plan import Node, Plan, find_layout, make_plan
from orchestrator.policy.elastic import Sizes
from orchestrator.state.checkpoint import load, step_of
from orchestrator.state.model_state import LEFT_OUT, further_entries, mismatches, own_tensors
from orchestrator.state.optimizer_state import optimizers_in
from orchestrator.state.optimizers import AnyOptimizer, ScheduleError, label_of, made_for
from orchestrator.state.train_state import TrainState, outline, restore
from orchestrator.strategies import registry
from orchestrator.strategies.constructor import Outline
from orchestrator.strategies.data.datasets import (
    FEEDING,
    SAMPLES_OF,
    NeedsFeederError,
    opened_dataset,
    size_error,
)
from orchestrator.strategies.rules import Rules
from orchestrator.strategies.training_step import joined, optimizers_of
from orchestrator.strategies.update.job_optimizer import optimizer_of, schedule_of

T = TypeVar("T")
OPEN_S = 30.0
"""How long it may take to open the data of an elastic run; a dataset of Ray Data refuses at once to be made here."""


@dataclass(frozen=True)
class Misfit:
    """Why a job cannot go on from a checkpoint; ``of_model`` if its parameters are not those of the checkpoint."""

    text: str
    of_model: bool = False


def check_job(
    rules: type[Rules[Any]],
    config: Config,
    job: Job,
    plan: Plan,
    errors: list[str],
    *,
    nodes: Sequence[Node] | None = None,
) -> tuple[str, ...]:
    """Check in a child process whether ``job`` can be trained by ``plan``; arguments and result as ``rules.check``.

    If the child dies, this is an error where the workers would build the model in the same way, and else a note.

    Args:
        nodes: those whose CPUs read data that needs tasks; None if these are not counted.
    """

    on_tasks: list[str] = []

    def check() -> tuple[tuple[str, ...], list[str], bool]:
        found: list[str] = []
        # Only plan=true says what reads the data; the workers of a run open it anyway.
        needs_tasks = config.plan and _is_read_by_tasks(config, job)
        return rules.check(config, job, plan, found), found, needs_tasks

    try:
        notes, found, needs_tasks = with_samples(config, job, check, on_tasks=on_tasks)
    except ChildDiedError as e:
        what = f"a process that built the job's model without memory, to check it, {e}"
        if plan.pipeline is None:
            return (f"{what}: nothing is known about the model",)
        errors.append(
            f"strategy={config.strategy.name}: {what}; the workers would build it in the same way to cut it into "
            "stages: use strategy=ddp, or find the cause in the code of the model"
        )
        return ()
    errors += found
    if on_tasks or needs_tasks:
        note, error = cpus_for_data(plan, nodes)
        errors += [] if error is None or config.cluster.autoscaling else [error]
        notes = (*notes, note)
    return notes


def _is_read_by_tasks(config: Config, job: Job) -> bool:
    """Return whether the training set is read by tasks, as far as opening it tells. Called in a child process."""
    try:
        with contextlib.suppress(Exception):
            opened_dataset(job, "train", config.seed)
    except NeedsFeederError:
        return True
    return False


def with_samples(config: Config, job: Job, check: Callable[[], T], *, on_tasks: list[str] | None = None) -> T:
    """Return what ``check`` finds in a child, with the first samples of data that only the cluster can read.

    ``on_tasks``: receives the splits of which it wants samples. Raises as :func:`in_child`.
    """
    try:
        while True:
            try:
                return in_child(check, timeout_s=config.recovery.build_max_s)
            except NeedsFeederError as e:
                (split,) = e.args
                if on_tasks is not None:
                    on_tasks.append(split)
                SAMPLES_OF[split] = _first_samples(config, job, split)
    finally:
        SAMPLES_OF.clear()


def _first_samples(config: Config, job: Job, split: str) -> Sequence[Any] | str:
    """Return the first samples of data that only tasks can read, or why they are not known."""

    def read() -> Sequence[Any] | str:
        return importlib.import_module(FEEDING).first_samples(job, split, config.seed)  # type: ignore[no-any-return]

    try:
        return beside_ray(read, cluster=config.cluster, timeout_s=config.recovery.build_max_s)
    except (ChildDiedError, ConfigError) as e:
        return f"and a process that read the first samples {e}"


def continuation_errors(
    config: Config, job: Job, checkpoint: Path, meta: Mapping[str, Any], *, is_own: bool
) -> list[Misfit]:
    """Return why ``job`` cannot go on from a checkpoint, without allocating its model.

    The checks run in child processes, because the model is built of fake tensors and the data may be large.

    Args:
        config: of the run that would go on.
        is_own: whether the run would read the data of before to their end.
    """

    checks: list[Callable[[], list[Misfit]]] = [lambda: _model_errors(config, job, checkpoint, meta)]
    if is_own:
        checks.append(lambda: _data_errors(config, job, checkpoint, meta))
    found: list[Misfit] = []
    for check in checks:
        with contextlib.suppress(ChildDiedError):
            found += in_child(check, timeout_s=config.recovery.build_max_s)
    return found


def _data_errors(config: Config, job: Job, checkpoint: Path, meta: Mapping[str, Any]) -> list[Misfit]:
    """Return whether the training set has another size; empty if it cannot be opened here."""
    try:
        dataset = opened_dataset(job, "train", config.seed)
    except (Exception, NeedsFeederError):  # the data may be on the workers alone
        return []
    error = size_error(dataset, meta, step=step_of(checkpoint.name), checkpoint=checkpoint)
    return [] if error is None else [Misfit(error)]


def _model_errors(config: Config, job: Job, checkpoint: Path, meta: Mapping[str, Any]) -> list[Misfit]:
    """Return how model, optimizer and schedule differ; empty if the model cannot be built without memory."""
    model = Outline(job, config.train).model
    if model is None:
        return []
    state = load(checkpoint)
    own = {name: t for name, t in own_tensors(model).items() if name not in meta.get(LEFT_OUT, {})}
    shapes = {name: (tuple(t.shape), t.dtype) for name, t in own.items()}
    further = further_entries(model)
    saved = {name: t for name, t in outline(state.model).items() if name not in further}
    errors = [Misfit(f"of another model: {line}", of_model=True) for line in mismatches(shapes, saved)]
    made = joined(optimizers_of(job, model)) if has_training_step(job) else optimizer_of(job, model)
    optimizer = label_of(made)
    if optimizer != meta["optimizer"]:
        text = (
            f"of another optimizer: {meta['optimizer']} in the checkpoint, {optimizer} in the job; let the job use the "
            "optimizer of the checkpoint"
        )
        errors.append(Misfit(text))
    if not errors and config.evaluate is None and (error := _schedule_error(config, job, model, made, state)):
        errors.append(Misfit(error))
    return errors


def _schedule_error(
    config: Config, job: Job, model: nn.Module, optimizer: AnyOptimizer, state: TrainState
) -> str | None:
    """Return why the schedule of a checkpoint cannot go on for ``train.steps``; None if it can, or if unknown.

    The settings of the optimizer are loaded without tensors, so a setting that is a tensor lacks its value.
    """
    if state.meta["scheduler"] is None or any(
        isinstance(value, Tensor) for group in optimizer.param_groups for value in group.values()
    ):
        return None
    before = made_for(state.meta["scheduler"]["state"])
    try:
        schedule = schedule_of(
            job,
            optimizers_in(optimizer),
            config.train,
            steps_per_epoch=before.get("steps_per_epoch"),
        )
        shapes = {name: tensor.to("meta") for name, tensor in outline(state.model).items()}
        restore(replace(state, model=shapes, optimizer={}), model, optimizer, schedule)
    except ScheduleError as e:
        return str(e)
    except Exception:  # of the job, or because of the missing values
        pass
    return None


def plan_sizes(
    config: Config, job: Job | None, nodes: tuple[Node, ...], errors: list[str], *, oversubscribe_cpus: bool
) -> Sizes | None:
    """Find the sizes that the run may have; the largest one with room on the nodes is the initial one.

    The layout of every size is checked, which is cheap. The job is checked once for each number of stages, which may
    build its model. Plans other than the initial one are made later.

    Args:
        job: None to leave out its check.
        nodes: the nodes of the cluster.
        errors: receives the reasons if there is no such size.
        oversubscribe_cpus: see :func:`make_plan`.
    """
    sizes = _PlannedSizes(config, job, nodes, oversubscribe_cpus=oversubscribe_cpus)
    requested = config.strategy.num_workers
    return sizes.elastic(*requested, errors) if isinstance(requested, tuple) else sizes.fixed(errors)


class _PlannedSizes:
    """The layouts and plans of one run at different numbers of workers."""

    def __init__(self, config: Config, job: Job | None, nodes: tuple[Node, ...], *, oversubscribe_cpus: bool):
        self._config = config
        self._job = job
        self._nodes = nodes
        self._oversubscribe_cpus = oversubscribe_cpus
        self._rules = registry.load(config.strategy.name)
        self._largest: Layout | None = None
        self._job_checks: dict[int, tuple[tuple[str, ...], list[str]]] = {}  # by the number of workers

    def fixed(self, errors: list[str]) -> Sizes | None:
        """Return the only size, and those in which survivors can save."""
        with collect_errors(errors):
            plan = self._make_plan(self._config)
            plan = replace(plan, notes=(*plan.notes, *self._check_job(self._config, plan, errors)))
            self._largest = Layout(mesh=plan.mesh, pipeline=plan.pipeline)
            return Sizes(
                [plan.mesh],
                lambda mesh: plan if mesh == plan.mesh else self._make_plan(self._at(mesh.num_workers)),
                initial=plan.mesh,
                find_rescues=lambda: self._rescues(plan.mesh),
            )
        return None

    def elastic(self, least: int, most: int, errors: list[str]) -> Sizes | None:
        """Return the sizes from ``least`` to ``most`` workers."""
        refused: list[str] = []
        meshes = self._checked_meshes(range(most, least - 1, -1), refused)[::-1]
        if not meshes:
            errors += refused
            return None
        # Those with room come first.
        num_with_room = bisect.bisect_left(meshes, True, key=lambda mesh: bool(self._room_errors(mesh)))
        if not num_with_room:
            errors += self._room_errors(meshes[0])
            return None
        initial = meshes[num_with_room - 1]
        note = f"as many workers as there are, {least} to {most}; the global batch stays"
        if self._cpus_of_data:
            note += f", and {self._cpus_of_data:g} CPU is left for the tasks that read the data"

        def make(mesh: Mesh) -> Plan:
            plan = self._make_plan(self._at(mesh.num_workers))
            on_job, _ = self._job_check(mesh.num_workers) if mesh == initial else ((), [])
            return replace(plan, notes=(*plan.notes, *on_job, note))

        return Sizes(
            meshes,
            make,
            initial=initial,
            find_rescues=lambda: self._rescues(meshes[0]),
            cpus_of_data=self._cpus_of_data,
        )

    def _checked_meshes(self, numbers: Iterable[int], refused: list[str]) -> list[Mesh]:
        """Return the mesh of each number of workers that is possible.

        Args:
            numbers: the largest first.
            refused: is set to the reasons against the last number that is not possible.
        """
        meshes: list[Mesh] = []
        job_errors: dict[tuple[int, bool], list[str]] = {}  # by the number of stages, and whether tensors are divided
        for number in numbers:
            layout_errors: list[str] = []
            layout = self._layout(number, layout_errors)
            if layout is None:
                refused[:] = layout_errors
                continue
            self._largest = self._largest or layout
            kind = layout.pipeline.num_stages if layout.pipeline else 1, layout.mesh.divides_tensors
            if kind not in job_errors:
                _, job_errors[kind] = self._job_check(number)
            if job_errors[kind]:
                refused[:] = job_errors[kind]
            else:
                meshes.append(layout.mesh)
        return meshes

    def _rescues(self, smallest: Mesh) -> list[Mesh]:
        """Return the meshes below ``smallest`` in which a worker could keep its stage or shard, the smallest first."""
        if not self._config.strategy.elastic:
            return []
        layouts = [self._layout(number, []) for number in range(1, smallest.num_workers)]
        return [layout.mesh for layout in layouts if layout and layout.mesh.has_parts_of(smallest)]

    def _layout(self, number: int, errors: list[str]) -> Layout | None:
        """Return the layout for this number of workers, whether there is room for them or not; None if impossible."""
        with collect_errors(errors):
            found = find_layout(self._at(number), self._rules, self._nodes, oversubscribe_cpus=self._oversubscribe_cpus)
            return found.layout
        return None

    def _room_errors(self, mesh: Mesh) -> list[str]:
        errors: list[str] = []
        config = replace(self._at(mesh.num_workers), cluster=self._config.cluster)
        with collect_errors(errors):
            find_layout(config, self._rules, self._nodes, oversubscribe_cpus=self._oversubscribe_cpus)
        if not errors and self._cpus_of_data:
            _, error = cpus_for_data(self._make_plan(self._at(mesh.num_workers)), self._nodes)
            errors += [] if error is None else [error]
        return errors

    @functools.cached_property
    def _cpus_of_data(self) -> float:
        """The CPUs that an elastic run leaves for the tasks that read its data; 0 if there are none, or on a cluster
        that adds nodes, or if it is not known in time.
        """
        config, job = self._config, self._job
        if job is None or self._oversubscribe_cpus or config.cluster.autoscaling:
            return 0.0
        with contextlib.suppress(ChildDiedError):
            timeout_s = min(OPEN_S, config.recovery.build_max_s)
            return float(in_child(lambda: _is_read_by_tasks(config, job), timeout_s=timeout_s))
        return 0.0

    def _at(self, number: int) -> Config:
        """Return the configuration of a run with this number of workers, whether there is room for them or not.

        Raises:
            ConfigError: workers of the largest size could not continue with it.
        """
        config, largest = self._config, self._largest
        strategy, recovery = replace(config.strategy, num_workers=number), config.recovery
        if largest is not None and number != largest.mesh.num_workers:
            resized = self._rules.resized(config.strategy, number, mesh=largest.mesh, pipeline=largest.pipeline)
            if resized is None:
                raise ConfigError([f"strategy.num_workers={number}: the micro-batches of larger sizes do not fit"])
            # The rank of an injected fault may exist in the largest size alone.
            strategy, recovery = resized, replace(recovery, chaos=())
        return replace(config, strategy=strategy, recovery=recovery, cluster=replace(config.cluster, autoscaling=True))

    def _make_plan(self, config: Config) -> Plan:
        return make_plan(config, self._rules, self._nodes, oversubscribe_cpus=self._oversubscribe_cpus)

    def _job_check(self, number: int) -> tuple[tuple[str, ...], list[str]]:
        """Return the notes and errors of the check of the job with this number of workers, which is made once."""
        if self._job is None:
            return (), []
        if number not in self._job_checks:
            config, errors = self._at(number), list[str]()
            self._job_checks[number] = self._check_job(config, self._make_plan(config), errors), errors
        return self._job_checks[number]

    def _check_job(self, config: Config, plan: Plan, errors: list[str]) -> tuple[str, ...]:
        if self._job is None:
            return ()
        nodes = None if self._oversubscribe_cpus else self._nodes
        return check_job(self._rules, config, self._job, plan, errors, nodes=nodes)

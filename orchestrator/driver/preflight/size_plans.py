"""The sizes that a run may have on the nodes of a cluster, checked before anything starts."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import replace

from orchestrator.config.build import ConfigError, collect_errors
from orchestrator.config.schema import Config
from orchestrator.driver.preflight.child_checks import check_job
from orchestrator.job import Job
from orchestrator.planning.layout import Layout
from orchestrator.planning.mesh import Mesh
from orchestrator.planning.plan import Node, Plan, find_layout, make_plan
from orchestrator.policy.elastic import Sizes
from orchestrator.strategies import registry


def plan_sizes(
    config: Config, job: Job | None, nodes: tuple[Node, ...], errors: list[str], *, oversubscribe_cpus: bool
) -> Sizes | None:
    """Find the sizes that the run may have; the largest one with room on the nodes is the initial one.

    The layout of every size is checked, which is cheap. The job is checked once for each number of stages, which may
    build its model. Plans other than the initial one are made later.

    Args:
        config: the configuration.
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

        def make(mesh: Mesh) -> Plan:
            plan = self._make_plan(self._at(mesh.num_workers))
            on_job, _ = self._job_check(mesh.num_workers) if mesh == initial else ((), [])
            return replace(plan, notes=(*plan.notes, *on_job, note))

        return Sizes(meshes, make, initial=initial, find_rescues=lambda: self._rescues(meshes[0]))

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
        return errors

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
        return () if self._job is None else check_job(self._rules, config, self._job, plan, errors)

"""Runs of a few steps that measure: they only train, and nothing of them stays."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import replace

from orchestrator.config.schema import Config
from orchestrator.driver.process.run_context import RunResult
from orchestrator.job import Job
from orchestrator.planning.plan import Plan
from orchestrator.records.output_dir import remove, staged_run

LONGEST_S = 300.0
"""The least timeout of the first step of a run that measures, in which one rank works while the others wait."""


def shortened(config: Config, plan: Plan, *, steps: int, log_every: int, folder: str) -> tuple[Config, Plan]:
    """Return ``config`` and ``plan`` for a run of ``steps`` in a ``folder`` below ``output_dir``.

    It evaluates nothing, uploads nothing, recovers from nothing, and calls no callbacks.
    """
    url, question_mark, query = config.output_dir.partition("?")
    brief = replace(
        config,
        name=f"{plan.job}-{plan.strategy}",
        resume="never",
        profile=False,
        callbacks=(),
        output_dir=f"{url.rstrip('/')}/{folder}{question_mark}{query}",
        train=config.train.only_training(steps=steps, log_every=log_every),
        checkpoint=replace(config.checkpoint, every=0, keep=1, best=None),
        tracking=replace(config.tracking, uri=None),
        recovery=replace(
            config.recovery,
            max_failures=0,
            spares=0,
            chaos=(),
            hang_max_s=max(LONGEST_S, config.recovery.hang_max_s),
        ),
        cluster=replace(config.cluster, collective_timeout_s=max(LONGEST_S, config.cluster.collective_timeout_s)),
    )
    return brief, replace(plan, run_name=brief.run_name, steps=steps, spares=0, faults=())


def without_samples(job: Job) -> Job:
    """Return a copy of ``job`` that draws no samples, so that a run of it without evaluations only trains."""
    cls = type(job)
    brief = copy.copy(job)
    object.__setattr__(brief, "__class__", type(cls.__name__, (cls,), {"draws_samples": False}))
    return brief


def remove_run(result: RunResult) -> None:
    """Remove a run that has measured. On a store that is away it stays."""
    with contextlib.suppress(OSError, ValueError):
        remove(staged_run(result.run_dir))

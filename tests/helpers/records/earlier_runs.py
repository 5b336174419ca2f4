"""Runs that ended before, and what a new command makes of them."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from jobs.digits import Digits
from orchestrator.config.build import ConfigError
from orchestrator.config.compose import compose
from orchestrator.config.redact import Redactor
from orchestrator.config.schema import Config
from orchestrator.driver.preflight.resume import Resume, find_resume
from orchestrator.driver.preflight.run_config import absolute_paths
from orchestrator.job import Job
from orchestrator.planning.plan import Node, Plan, make_plan
from orchestrator.records import run_dir as rundir
from orchestrator.records.lock import this_process
from orchestrator.records.run_dir import RunDir
from orchestrator.state.best import BEST, BestSoFar
from orchestrator.state.checkpoint import save
from orchestrator.state.train_state import capture
from orchestrator.strategies import registry

JOB = Digits(hidden=4)
NODES = (Node(node_id="n", name="n", cpus=2, gpus=0),)
NOBODY = {**this_process(), "start_ticks": 0}
"""A driver that is dead: another process has its number."""


def config_of(output_dir: Path, *words: str) -> Config:
    errors: list[str] = []
    config, _ = compose([f"output_dir='{output_dir}'", *words], errors, registry.config_class)
    assert config is not None, errors
    return absolute_paths(config)


def plan_of(config: Config) -> Plan:
    return make_plan(config, registry.load(config.strategy.name), NODES, oversubscribe_cpus=True)


def an_earlier_run(
    output_dir: Path,
    *,
    job: Job = JOB,
    steps: Iterable[int] = (3,),
    state: str = "failed",
    name: str = "digits-ddp",
    driver: dict[str, Any] = NOBODY,
) -> RunDir:
    run = rundir.create(output_dir, name)
    run.update_record(name=name, uid="first", state=state, driver=driver)
    save_steps(run, steps, job)
    return run


def save_steps(run: RunDir, steps: Iterable[int], job: Job = JOB, best: BestSoFar | None = None) -> None:
    model = job.model()
    optimizer = job.optimizer(model.parameters())
    for step in steps:
        state = capture(model, optimizer, None, step=step, samples_consumed=step)
        state.meta.update({} if best is None else {BEST: best.to_json()})
        save(run.checkpoints, state, run_uid="first")


def resume(config: Config, job: Job = JOB) -> tuple[Resume | None, list[str]]:
    warnings: list[str] = []
    return find_resume(config, job, warnings=warnings, redactor=Redactor()), warnings


def refused(config: Config, job: Job = JOB) -> list[str]:
    with pytest.raises(ConfigError) as error:
        resume(config, job)
    return list(error.value.errors)

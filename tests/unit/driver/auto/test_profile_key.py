"""Which changes of a job, of its configuration or of the machine make the profile of an earlier run unusable."""

from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import pytest
from torch import nn

from helpers.conformance.cases import Case, config_of, plan_of
from jobs.digits import Digits
from orchestrator.config.compose import compose
from orchestrator.config.schema import Config
from orchestrator.driver.auto.chooser import hardware_key, profile_key
from orchestrator.job import Job
from orchestrator.planning.plan import Node
from orchestrator.strategies import registry
from orchestrator.tuning.choice import StrategyName

pytestmark = pytest.mark.slow

HERE = Node(node_id="here", name="here", cpus=8, gpus=0)


def key(
    job: Job, *overrides: str, node: Node = HERE, threads: int = 1, change: Callable[[Config], Config] = lambda c: c
) -> str:
    errors: list[str] = []
    composed, _ = compose(["strategy=auto", "strategy.num_workers=2", *overrides], errors, registry.config_class)
    assert composed is not None, errors
    config = change(config_of(Case(job=job), 1, strategy=composed.strategy))
    return profile_key(config, job, replace(plan_of(config), threads_per_worker=threads), (node,))


def job_of(activation: type[nn.Module], *, rate: float = 0.1) -> Job:
    """Return a job whose class has the same code for every ``activation``."""

    class Mine(Digits):
        def model(self) -> nn.Module:
            return nn.Sequential(nn.Linear(64, 10), activation())

    return Mine(hidden=8, depth=1, lr=rate, momentum=0.9)


def without(*strategies: str) -> str:
    return f"strategy.candidates=[{','.join(name for name in get_args(StrategyName) if name not in strategies)}]"


JOB = Digits(hidden=8, depth=1, lr=0.1, momentum=0.9)


def test_the_same_run_has_the_same_key_whatever_it_logs() -> None:
    logs = key(JOB, change=lambda c: replace(c, train=replace(c.train, steps=99, log_every=7)))
    assert key(JOB) == key(Digits(hidden=8, depth=1, lr=0.1, momentum=0.9)) == logs
    assert key(JOB, "strategy.measured=4") == key(JOB)


@pytest.mark.parametrize(
    "changed",
    [
        lambda: key(replace(JOB, hidden=16)),
        lambda: key(JOB, threads=2),
        lambda: key(JOB, node=replace(HERE, cpus=4)),
        lambda: key(JOB, node=replace(HERE, gpus=1)),
        lambda: key(JOB, "strategy.schedules=[GPipe]"),
        lambda: key(JOB, without("parameter_server")),
        lambda: key(JOB, without("model_parallel", "pipeline", "ddp_pipeline", "fsdp_pipeline")),
        lambda: key(JOB, without("dp")),
        lambda: key(JOB, without("fsdp", "hsdp", "fsdp_pipeline", "mesh")),
        lambda: key(JOB, change=lambda c: replace(c, train=replace(c.train, global_batch_size=128))),
    ],
    ids=["field", "threads", "cpus", "gpus", "schedules", "servers", "stages", "devices", "parts", "batch"],
)
def test_another_job_size_or_machine_has_another_key(changed: Callable[[], str]) -> None:
    assert changed() != key(JOB)


def test_an_edited_model_has_another_key() -> None:
    assert key(job_of(nn.ReLU)) == key(job_of(nn.ReLU))
    assert key(job_of(nn.ReLU)) != key(job_of(nn.GELU)), "its modules are others, although its source is the same"
    assert key(job_of(nn.ReLU)) != key(Digits(hidden=8, depth=1, lr=0.1, momentum=0.9))


def test_the_key_of_the_hardware_is_the_same_for_all_jobs() -> None:
    errors: list[str] = []
    composed, _ = compose(["strategy=auto"], errors, registry.config_class)
    assert composed is not None, errors
    plans = [plan_of(config_of(Case(job=replace(JOB, hidden=h)), 1, strategy=composed.strategy)) for h in (8, 16)]
    first, second = (hardware_key(plan, (HERE,)) for plan in plans)
    assert first == second
    assert first != hardware_key(plans[0], (replace(HERE, cpus=4),))

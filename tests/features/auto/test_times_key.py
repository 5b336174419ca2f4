"""Which changes of a job, of its configuration or of the machine make the step times of an earlier run unusable."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from torch import nn

from helpers.conformance.cases import Case, config_of, plan_of
from jobs.digits import Digits
from orchestrator.config.compose import compose
from orchestrator.config.schema import Config
from orchestrator.features.auto.chooser import times_key
from orchestrator.job import Job
from orchestrator.planning.plan import Node
from orchestrator.strategies import registry

pytestmark = pytest.mark.slow

HERE = Node(node_id="here", name="here", cpus=8, gpus=0)


def key(
    job: Job, *overrides: str, node: Node = HERE, threads: int = 1, change: Callable[[Config], Config] = lambda c: c
) -> str:
    errors: list[str] = []
    composed, _ = compose(["strategy=auto", "strategy.num_workers=2", *overrides], errors, registry.config_class)
    assert composed is not None, errors
    config = change(config_of(Case(job=job), 1, strategy=composed.strategy))
    return times_key(config, job, replace(plan_of(config), threads_per_worker=threads), (node,))


def job_of(activation: type[nn.Module], *, rate: float = 0.1) -> Job:
    """Return a job whose class has the same code for every ``activation``."""

    class Mine(Digits):
        def model(self) -> nn.Module:
            return nn.Sequential(nn.Linear(64, 10), activation())

    return Mine(hidden=8, depth=1, lr=rate, momentum=0.9)


JOB = Digits(hidden=8, depth=1, lr=0.1, momentum=0.9)


def test_the_same_run_has_the_same_key_whatever_it_logs() -> None:
    logs = key(JOB, change=lambda c: replace(c, train=replace(c.train, steps=99, log_every=7)))
    assert key(JOB) == key(Digits(hidden=8, depth=1, lr=0.1, momentum=0.9)) == logs
    assert key(JOB, "strategy.measured=4", "strategy.candidates=[ddp]") == key(JOB)


@pytest.mark.parametrize(
    "changed",
    [
        lambda: key(replace(JOB, hidden=16)),
        lambda: key(JOB, threads=2),
        lambda: key(JOB, node=replace(HERE, cpus=4)),
        lambda: key(JOB, node=replace(HERE, gpus=1)),
        lambda: key(JOB, change=lambda c: replace(c, train=replace(c.train, global_batch_size=128))),
    ],
    ids=["field", "threads", "cpus", "gpus", "batch"],
)
def test_another_job_size_or_machine_has_another_key(changed: Callable[[], str]) -> None:
    assert changed() != key(JOB)


def test_an_edited_model_has_another_key() -> None:
    assert key(job_of(nn.ReLU)) == key(job_of(nn.ReLU))
    assert key(job_of(nn.ReLU)) != key(job_of(nn.GELU)), "its modules are others, although its source is the same"
    assert key(job_of(nn.ReLU)) != key(Digits(hidden=8, depth=1, lr=0.1, momentum=0.9))

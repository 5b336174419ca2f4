"""The trial on the driver: which optimizers could not be resumed, or not be trained in stages."""

from __future__ import annotations

import pytest

from helpers.conformance.cases import Case, config_of, having, plan_of
from helpers.conformance.layouts import EVERY
from helpers.jobs.optimizers import KINDS, OptimizedDigits
from helpers.jobs.quick_jobs import AdamDigits, digits
from helpers.jobs.step_toys import GAN
from orchestrator.job import Job
from orchestrator.strategies.resume_trial import optimizer_errors

TRAIN = having(steps=6, global_batch_size=24)


def errors(job: Job, layout: str = "single", **train: object) -> list[str]:
    chosen = EVERY[layout]
    case = chosen.of(Case(job=job, train=having(TRAIN, **train)))
    config = config_of(case, chosen.world_size)
    return optimizer_errors(config, job, plan_of(config))


@pytest.mark.parametrize("layout", ["single", "1F1B-2"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_state_dict_says_is_enough(kind: str, layout: str) -> None:
    assert errors(OptimizedDigits(kind=kind), layout) == []
    assert errors(OptimizedDigits(kind=kind), layout, ema_decay=0.9) == []


def test_optimizers_of_torch_pass() -> None:
    for job in (digits(), AdamDigits(), GAN()):
        assert errors(job) == []
    assert errors(AdamDigits(), "1F1B-2", precision="bf16-true") == []


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("forgetful", "Job.optimizer: Forgetful: its update of "),
        ("sharpness", "Job.optimizer: Sharpness: "),
        ("unsavable", "Job.optimizer: Unsavable: its state 'history' of "),
    ],
)
def test_an_optimizer_that_keeps_something_to_itself_is_refused(kind: str, words: str) -> None:
    (error,) = errors(OptimizedDigits(kind=kind))
    assert error.startswith(words)
    assert "load_state_dict()" in error or "let state_dict() return" in error


def test_stages_refuse_an_optimizer_that_compares_parameters() -> None:
    assert errors(OptimizedDigits(kind="global")) == []
    (error,) = errors(OptimizedDigits(kind="global"), "1F1B-2")
    assert error.startswith("strategy=pipeline: Job.optimizer: Global: ")
    assert error.endswith("use strategy=ddp")

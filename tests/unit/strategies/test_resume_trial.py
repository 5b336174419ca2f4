"""The trial on the driver: which optimizers could not be resumed, or not be trained in stages."""

import random
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from helpers.conformance.cases import Case, config_of, having, plan_of
from helpers.conformance.layouts import EVERY
from helpers.jobs.optimizers import (
    KINDS,
    Forgetful,
    Global,
    OptimizedDigits,
    OwnStep,
    Sharpness,
    TwoPasses,
    Unsavable,
)
from helpers.jobs.step_toys import GAN
from orchestrator.job import Job
from orchestrator.strategies.checks.optimizer_trials import optimizer_errors
from orchestrator.strategies.constructor import Outline
from orchestrator.strategies.update.job_optimizer import ELEMENTWISE

TRAIN = having(steps=6, global_batch_size=24)


def errors(job: Job, layout: str = "single", **train: object) -> list[str]:
    chosen = EVERY[layout]
    case = chosen.of(Case(job=job, train=having(TRAIN, **train)))
    config = config_of(case, chosen.world_size)
    model = Outline(job, config.train).model
    before = dict(model.named_parameters())
    found = optimizer_errors(config, job, plan_of(config), model)
    assert all(p is before[name] for name, p in model.named_parameters()), "other checks see the model too"
    return found


@pytest.mark.parametrize("layout", ["single", "1F1B-2"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_state_dict_says_is_enough(kind: str, layout: str) -> None:
    assert errors(OptimizedDigits(kind=KINDS[kind]), layout) == []
    assert errors(OptimizedDigits(kind=KINDS[kind]), layout, ema_decay=0.9) == []


@pytest.mark.parametrize("name", [*(kind.__name__ for kind in ELEMENTWISE), "Adafactor", "SparseAdam", "LBFGS"])
def test_optimizers_of_torch_pass(name: str) -> None:
    job = OptimizedDigits(kind=partial(getattr(torch.optim, name), lr=0.01))
    for precision in ("fp32", "bf16-true"):
        assert errors(job, precision=precision) == []
    assert errors(job, "1F1B-2") == [] or name == "LBFGS"


def test_several_optimizers_pass() -> None:
    assert errors(GAN()) == []


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Forgetful, "Job.optimizer: Forgetful: its update of "),
        (Sharpness, "Job.optimizer: Sharpness: "),
        (TwoPasses, "Job.optimizer: TwoPasses: its update of "),
        (Unsavable, "Job.optimizer: Unsavable: its state 'history' of "),
    ],
)
def test_an_optimizer_that_keeps_something_to_itself_is_refused(kind: type[Optimizer], words: str) -> None:
    (error,) = errors(OptimizedDigits(kind=kind))
    assert error.startswith(words)
    assert "load_state_dict()" in error or "let state_dict() return" in error


def test_stages_refuse_an_optimizer_that_compares_parameters() -> None:
    assert errors(OptimizedDigits(kind=Global)) == []
    (error,) = errors(OptimizedDigits(kind=Global), "1F1B-2")
    assert error.startswith("strategy=pipeline: Job.optimizer: Global: ")
    assert error.endswith("use strategy=ddp")


class Noisy(OwnStep):
    """Adds noise to gradients, as Langevin dynamics do."""

    def direction(self, p: nn.Parameter) -> torch.Tensor:
        return p.grad + torch.randn_like(p) + random.random() + np.random.rand()


@pytest.mark.parametrize("layout", ["single", "1F1B-2"])
def test_what_an_optimizer_draws_is_no_difference(layout: str) -> None:
    assert errors(OptimizedDigits(kind=Noisy), layout) == []


RATE = torch.tensor(0.1)


def test_a_trial_leaves_a_learning_rate_that_is_a_tensor_of_the_job() -> None:
    assert errors(OptimizedDigits(kind=partial(torch.optim.SGD, lr=RATE))) == []
    assert torch.equal(RATE, torch.tensor(0.1))

"""A schedule goes on for another number of steps as one that was made for it, or it is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn, optim
from torch.optim import lr_scheduler as lr

from helpers.files.golden import Golden
from orchestrator.state.checkpoint import load, save
from orchestrator.state.optimizers import Schedule, ScheduleError, without_length
from orchestrator.state.train_state import capture, restore

Make = Callable[[optim.Optimizer, int], Any]
REACHED = 6


class Warmup:
    """A factor with the number of steps in an attribute, which a checkpoint keeps."""

    def __init__(self, steps: int):
        self.steps = steps

    def __call__(self, step: int) -> float:
        return 1 - step / self.steps


class Halving(lr.LRScheduler):
    """Halves what the rate is now at two thirds of the run."""

    def __init__(self, optimizer: optim.Optimizer, steps: int):
        self.at = 2 * steps // 3
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        return [group["lr"] / (2 if self.last_epoch == self.at else 1) for group in self.optimizer.param_groups]


class Plain:
    """No scheduler of torch: it enters no initial rate into the groups."""

    def __init__(self, optimizer: optim.Optimizer, steps: int):
        self.optimizer = optimizer
        self.steps = steps
        self.rate = optimizer.param_groups[0]["lr"]
        self.updates = 0

    def step(self) -> None:
        self.updates += 1
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * (1 - self.updates / self.steps)

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updates = state["updates"]


class Moody(lr.LRScheduler):
    """Depends on how often it was made."""

    made = 0

    def __init__(self, optimizer: optim.Optimizer, steps: int):
        Moody.made += 1
        self.mood = Moody.made
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        return [base * self.mood for base in self.base_lrs]


SCHEDULES: dict[str, Make] = {
    "lambda": lambda o, n: lr.LambdaLR(o, lambda step: 1 - step / n),
    "lambda with state": lambda o, n: lr.LambdaLR(o, Warmup(n)),
    "multiplicative": lambda o, n: lr.MultiplicativeLR(o, lambda step: 1 - 1 / n),
    "cosine": lambda o, n: lr.CosineAnnealingLR(o, T_max=n, eta_min=0.01),
    "linear": lambda o, n: lr.LinearLR(o, 1.0, 0.0, total_iters=n),
    "polynomial": lambda o, n: lr.PolynomialLR(o, total_iters=n, power=2),
    "one cycle": lambda o, n: lr.OneCycleLR(o, max_lr=1.0, total_steps=n + 1),
    "milestones": lambda o, n: lr.MultiStepLR(o, [n // 2, n - 1]),
    "restarts": lambda o, n: lr.CosineAnnealingWarmRestarts(o, T_0=n),
    "own": Halving,
    "no class of torch": Plain,
    "sequence": lambda o, n: lr.SequentialLR(
        o, [lr.LinearLR(o, 0.1, total_iters=2), lr.CosineAnnealingLR(o, n - 2)], milestones=[2]
    ),
    "chain": lambda o, n: lr.ChainedScheduler([lr.LinearLR(o, 0.1, total_iters=3), lr.PolynomialLR(o, n)]),
    "no length": lambda o, n: lr.StepLR(o, 4),
}


class Training:
    """Updates of two optimizers with equal schedules."""

    def __init__(self, make: Make, steps: int):
        self.model = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)])
        self.optimizers = [optim.SGD(part.parameters(), lr=1.0, momentum=0.9) for part in self.model]
        self.schedules = [
            Schedule([o], lambda o, steps, **_: make(o, steps), steps=steps, steps_per_epoch=None)
            for o in self.optimizers
        ]

    def rates(self, count: int) -> list[Any]:
        """Make updates; the settings that each of them had."""
        seen = []
        for _ in range(count):
            seen.append([(g["lr"], g["momentum"]) for o in self.optimizers for g in o.param_groups])
            for optimizer, schedule in zip(self.optimizers, self.schedules, strict=True):
                optimizer.step()
                schedule.step()
        return seen

    def continued(self, make: Make, steps: int, path: Path) -> Training:
        """Another one that goes on from a checkpoint of this one."""
        other = Training(make, steps)
        for number, (part, schedule) in enumerate(zip(self.model, self.schedules, strict=True)):
            state = capture(part, self.optimizers[number], schedule, step=REACHED, samples_consumed=REACHED)
            state = load(save(path / str(number), state, run_uid="r"))
            restore(state, other.model[number], other.optimizers[number], other.schedules[number])
        return other


@pytest.mark.parametrize("after", [12, 8, 6], ids=["longer", "shorter", "as long"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_goes_on_as_one_of_the_new_length(tmp_path: Path, name: str, after: int) -> None:
    make = SCHEDULES[name]
    first = Training(make, 9 if after == 8 else REACHED)
    first.rates(REACHED)
    whole = Training(make, after).rates(after)[REACHED:]
    found = first.continued(make, after, tmp_path).rates(after - REACHED)
    assert [[tuple(round(v, 9) for v in s) for s in step] for step in found] == [
        [tuple(round(v, 9) for v in s) for s in step] for step in whole
    ]


def test_a_schedule_that_is_no_function_of_the_updates_is_refused(tmp_path: Path, golden: Golden) -> None:
    first = Training(Moody, REACHED)
    first.rates(REACHED)
    with golden.raises(ScheduleError):
        first.continued(Moody, 12, tmp_path)
    assert first.continued(Moody, REACHED, tmp_path / "same").schedules[0].updates == REACHED


def test_an_evaluation_takes_any_schedule_as_it_is() -> None:
    first, other = Training(Moody, REACHED), Training(Moody, 3)
    first.rates(REACHED)
    meta = {"scheduler": {"state": first.schedules[0].state_dict()}}
    without_length(meta)
    other.schedules[0].load_state_dict(meta["scheduler"]["state"])
    without_length({"scheduler": None})


def test_a_schedule_with_other_settings_is_refused_for_another_length(tmp_path: Path, golden: Golden) -> None:
    first = Training(SCHEDULES["cosine"], REACHED)
    first.rates(REACHED)
    with golden.raises(ScheduleError):
        first.continued(lambda o, n: lr.CosineAnnealingLR(o, T_max=n, eta_min=0.5), 12, tmp_path)


def test_factors_are_those_of_the_job_now(tmp_path: Path) -> None:
    first = Training(SCHEDULES["lambda"], REACHED)
    first.rates(REACHED)
    other = first.continued(lambda o, n: lr.LambdaLR(o, lambda step: math.exp(-step / n)), 12, tmp_path)
    assert other.rates(1)[0][0][0] == pytest.approx(math.exp(-0.5))

"""Each module trains in the mode, train or eval, that the job has given it; an evaluation does not change it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Self

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from helpers.conformance.cases import DDP, Case, having
from helpers.conformance.layouts import DP, MODEL_PARALLEL, PARAMETER_SERVER, pipeline
from helpers.conformance.training import Steps as Seen
from helpers.conformance.training import losses, make, steps, watched
from helpers.jobs.toys import Toy
from helpers.ranks.gang import Gang
from orchestrator.config import schema
from orchestrator.features.asynchronous.parameter_server.server import Server


def frozen_norm() -> nn.Module:
    norm = nn.BatchNorm1d(16)
    norm.running_mean = torch.linspace(-1, 1, 16)
    return norm.eval()


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 16), frozen_norm(), nn.ReLU(), nn.Linear(16, 4))


class Residual(nn.Module):
    """No Sequential, so that a pipeline records it, and no rank has its ``train()``."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(10, 16), frozen_norm().train(), nn.Linear(16, 4)

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        return self.head(hidden + self.norm(hidden).relu())


def train_and_evaluate(rank: int, case: Case) -> Seen:
    """Train with an evaluation after the second step."""
    strategy = make(case, rank)
    results = list(steps(strategy, last=2))
    if not isinstance(strategy, Server):
        strategy.evaluate(default_collate([case.job.dataset("val")[i] for i in range(8)]), 8)
    return watched(strategy, [*results, *steps(strategy, first=3)])


@pytest.mark.parametrize(
    ("build", "options", "world_size"),
    [
        (layers, None, 1),
        (layers, DP, 1),
        (Residual, DDP, 2),
        (layers, PARAMETER_SERVER, 4),
        (layers, pipeline("1F1B", 2), 2),
        (Residual, replace(MODEL_PARALLEL, split=("head",)), 2),
    ],
    ids=["single", "dp", "ddp", "parameter_server", "pipeline", "recorded"],
)
def test_frozen_batchnorm_stays_frozen(
    gang: Gang, build: Callable[[], nn.Module], options: schema.StrategyConfig | None, world_size: int
) -> None:
    case = Case(job=Toy(build=build), train=having(steps=5, global_batch_size=8))
    norm = build().get_submodule("1" if build is layers else "norm")
    (undisturbed,) = gang.run(train_and_evaluate, replace(case, train=having(case.train, steps=2)), world_size=1)
    chosen = replace(case, options=options or DDP, alone=options if world_size == 1 else None)
    ranks = gang.run(train_and_evaluate, chosen, world_size=world_size)
    torch.testing.assert_close(losses(ranks)[:2], losses([undisturbed]), rtol=1e-5, atol=0)
    means = [t for r in ranks for name, t in r.model.items() if name.endswith("running_mean")]
    assert means
    assert all(torch.equal(mean, norm.running_mean) for mean in means)


def pretrained() -> nn.Module:
    """A model in eval mode, as ``from_pretrained`` returns it."""
    return nn.Sequential(nn.Linear(10, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4)).eval()


@pytest.mark.parametrize(("options", "world_size"), [(None, 1), (MODEL_PARALLEL, 2)], ids=["single", "model_parallel"])
def test_a_model_that_is_wholly_in_eval_mode_is_trained(
    gang: Gang, options: schema.StrategyConfig | None, world_size: int
) -> None:
    case = Case(job=Toy(build=pretrained), train=having(steps=4, global_batch_size=8), options=options or DDP)
    ranks = gang.run(train_and_evaluate, case, world_size=world_size)
    (tracked,) = [t for r in ranks for name, t in r.model.items() if name.endswith("num_batches_tracked")]
    assert tracked == 4

"""Models whose replicas would drift apart are refused before anything starts."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from helpers.jobs.toys import Toy
from helpers.machines.plans import GPU_BOX, config_of, plan_of
from orchestrator.job import Split
from orchestrator.strategies import registry
from orchestrator.strategies.constructor import Outline


@dataclass(frozen=True, kw_only=True)
class Table(Toy):
    max_norm: float | None = 1.0

    def model(self) -> nn.Module:
        table = nn.EmbeddingBag(10, 16, max_norm=self.max_norm)
        return nn.Sequential(table, nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4))

    def dataset(self, split: Split) -> TensorDataset:
        return TensorDataset(torch.zeros(64, 3, dtype=torch.long), torch.zeros(64, 4))


ASYNCHRONOUS = pytest.mark.needs("asynchronous")


def errors_of(job: Table, *overrides: str) -> list[str]:
    config, plan = config_of(*overrides), plan_of(GPU_BOX, *overrides)
    errors: list[str] = []
    registry.load(config.strategy.name).check_job(config, Outline(job, config.train), plan, errors)
    return errors


@pytest.mark.parametrize(
    "overrides",
    [
        ("strategy=ddp", "strategy.num_workers=2"),
        pytest.param(("strategy=dp", "strategy.num_workers=2"), marks=ASYNCHRONOUS),
        pytest.param(("strategy=parameter_server", "strategy.num_workers=2"), marks=ASYNCHRONOUS),
        pytest.param(("strategy=parameter_server", "strategy.num_workers=1"), marks=ASYNCHRONOUS),
        ("strategy=ddp_pipeline", "strategy.num_workers=4", "strategy.pipeline_parallel_size=2"),
    ],
)
def test_max_norm_of_an_embedding_is_refused_with_replicas(overrides: tuple[str, ...]) -> None:
    assert [error for error in errors_of(Table(), *overrides) if error.startswith("max_norm of 0: each replica")]
    assert not [error for error in errors_of(Table(max_norm=None), *overrides) if "max_norm" in error]


@pytest.mark.parametrize("name", ["single", *(pytest.param(n, marks=ASYNCHRONOUS) for n in ("hogwild", "locked_sgd"))])
def test_with_one_table_for_all_it_is_not(name: str) -> None:
    """The workers of hogwild rescale rows of the shared memory."""
    assert not [error for error in errors_of(Table(), f"strategy={name}") if "max_norm" in error]

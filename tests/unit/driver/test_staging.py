"""What is known of cutting a model before anything starts: notes for a person, and faults."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from helpers.files.golden import Golden
from helpers.machines.plans import notes_of
from orchestrator.config.build import ConfigError
from orchestrator.driver.checked_runs import check_all
from orchestrator.job import Job, Split


@dataclass(frozen=True, kw_only=True)
class Rows(Job):
    """Eight numbers in, one out."""

    def model(self) -> nn.Module:
        return nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))

    def dataset(self, split: Split) -> Dataset[Any]:
        return TensorDataset(torch.ones(100, 8), torch.ones(100, 8))

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target)

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)


@dataclass(frozen=True, kw_only=True)
class Normed(Rows):
    norm: type[nn.Module] = nn.BatchNorm1d

    def model(self) -> nn.Module:
        layers = [nn.Sequential(nn.Linear(8, 8), self.norm(8)) for _ in range(4)]
        return nn.Sequential(*layers)


class FrozenNorms(Normed):
    """Its BatchNorms are in eval mode, in which they use their running statistics."""

    def model(self) -> nn.Module:
        model = super().model()
        for layer in model.children():
            layer.get_submodule("1").eval()
        return model


class Branches(nn.Module):
    """No Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x))) + x


class Traced(Rows):
    def model(self) -> nn.Module:
        return Branches()


class Worded(Traced):
    """Its inputs have something that is no tensor."""

    def collate(self, items: list[Any]) -> Any:
        return {"x": torch.ones(len(items), 8), "word": "hello"}, torch.ones(len(items), 8)


class Frozen(Rows):
    def model(self) -> nn.Module:
        return super().model().requires_grad_(False)


def through_numpy(layer: nn.Linear) -> nn.Linear:
    layer.weight = nn.Parameter(torch.as_tensor(np.sin(layer.weight.detach().numpy())))
    return layer


class Keywords(Rows):
    def forward(self, model: nn.Module, inputs: Any) -> Any:
        return model(**inputs)


class ThroughNumpy(Rows):
    def model(self) -> nn.Module:
        return nn.Sequential(*(through_numpy(nn.Linear(8, 8)) for _ in range(2)))


class TracedThroughNumpy(Rows):
    def model(self) -> nn.Module:
        model = Branches()
        model.norm = nn.Identity()
        through_numpy(model.last)
        return model


def new_notes(job: Job, *words: str) -> tuple[str, ...]:
    notes, errors = notes_of(job, *words)
    assert errors == []
    return notes


@pytest.mark.parametrize(
    ("words", "rows", "together"),
    [
        ("strategy=pipeline strategy.num_microbatches=8", 8, 64),
        ("strategy=pipeline strategy.num_microbatches=8 train.grad_accumulation=2", 4, 32),
        ("strategy=ddp_pipeline strategy.num_microbatches=4", 8, 64),
        ("strategy=ddp_pipeline strategy.schedule=GPipe strategy.num_microbatches=1", 32, 64),
    ],
)
def test_statistics_of_micro_batches_are_noted(words: str, rows: int, together: int, golden: Golden) -> None:
    (note,) = new_notes(Normed(), *words.split())
    golden.says(note)
    assert f"micro-batches of {rows} samples, with strategy=single those of {together}:" in note


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (Normed(), "strategy=model_parallel"),
        (Normed(), "strategy=model_parallel train.grad_accumulation=2"),
        (Rows(), "strategy=pipeline strategy.num_microbatches=8"),
        (Normed(norm=nn.LayerNorm), "strategy=pipeline strategy.num_microbatches=8"),
        (FrozenNorms(), "strategy=pipeline strategy.num_microbatches=8"),
    ],
)
def test_nothing_is_noted_where_all_is_as_on_one_worker(job: Job, words: str) -> None:
    assert new_notes(job, *words.split()) == ()


def test_of_a_recorded_model_too() -> None:
    (note,) = new_notes(Traced(), "strategy=pipeline", "strategy.num_microbatches=8", "strategy.split=[norm]")
    assert note.startswith("BatchNorm (norm)")


@pytest.mark.parametrize("job", [ThroughNumpy(), TracedThroughNumpy()])
def test_a_constructor_that_needs_the_memory_of_the_whole_model_is_noted(job: Job) -> None:
    (note,) = new_notes(job, "strategy=pipeline")
    assert note.startswith("job.model() cannot build a part of the model (RuntimeError: .numpy() is")
    assert "each worker builds all of it" in note


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (Frozen(), "strategy=pipeline"),
        (Normed(norm=nn.SyncBatchNorm), "strategy=ddp_pipeline"),
        (Rows(), "strategy=pipeline strategy.num_workers=8"),
        (Worded(), "strategy=pipeline strategy.split=[norm]"),
        (Rows(), "strategy=pipeline strategy.split=[9]"),
    ],
    ids=["frozen", "synchronized", "too few layers", "a word", "no such layer"],
)
def test_a_model_that_cannot_be_cut_is_an_error(job: Job, words: str, golden: Golden) -> None:
    _, (error,) = notes_of(job, *words.split())
    golden.says(error)


def test_an_error_with_random_values_is_told() -> None:
    _, (error,) = notes_of(Keywords(), "strategy=model_parallel")
    said = "strategy=model_parallel: the job: its forward() fails with random values in place of a batch (TypeError: "
    assert error.startswith(said)


def test_a_model_that_is_not_cut_is_not_looked_at() -> None:
    assert notes_of(Frozen(), "strategy=ddp") == ((), [])


def test_the_notes_stand_in_the_plan_of_a_run(tmp_path: Path) -> None:
    words = [f"output_dir={tmp_path}", "tracking=none", "strategy=pipeline", "job._target_=test_staging.Normed"]
    (checked_run,) = check_all([words])
    assert any(note.startswith("BatchNorm (0.1, 1.1, and 2 more)") for note in checked_run.sizes.initial.notes)


def test_a_model_that_needs_the_values_of_its_batch_is_refused(tmp_path: Path) -> None:
    words = ["strategy=pipeline", "job=names", "cluster=local", "tracking=none", f"output_dir={tmp_path}"]
    with pytest.raises(ConfigError) as refused:
        check_all([words])
    (error,) = refused.value.errors
    assert "Speller: its forward() fails with tensors that have a shape and no values, outside of the layers (" in error

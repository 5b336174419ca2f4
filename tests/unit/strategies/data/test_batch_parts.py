"""Jobs that train otherwise on parts of a batch are found before training, and others are not accused."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

from helpers.conformance.cases import DDP, SINGLE, TRAIN, Case, config_of, plan_of
from helpers.conformance.layouts import FSDP, pipeline
from helpers.conformance.training import built
from helpers.files.golden import Golden
from helpers.jobs.batch_toys import DEPEND, EQUAL, LOSS, OfBatches, class_weighted, contrastive, summed
from helpers.jobs.toys import Rows
from helpers.models.catalogue import job_of
from helpers.models.zoo_cells import STRATEGIES
from orchestrator.config.schema import StrategyConfig
from orchestrator.job import Job, Split
from orchestrator.strategies.mesh_trainer import MeshTrainer
from orchestrator.strategies.rank_context import Context

CPU = torch.device("cpu")


def warnings(job: Job, options: StrategyConfig, **layout: int) -> str:
    return "\n".join(remark.text for remark in built(job, options, **layout).setup_warnings())


@pytest.mark.parametrize("name", DEPEND)
def test_what_replicas_would_change_is_said(name: str) -> None:
    job, words, _ = DEPEND[name]
    said = warnings(job, DDP)
    assert bool(said) == bool(words), said
    assert [word for word in words if word not in said] == []
    assert said.count("strategy=ddp strategy.num_workers=2: this job trains otherwise") == bool(words)


@pytest.mark.parametrize("name", DEPEND)
def test_so_is_what_accumulation_would_change(name: str) -> None:
    job, _, words = DEPEND[name]
    said = warnings(job, SINGLE, replicas=1, accumulation=2)
    assert said.startswith("strategy=single train.grad_accumulation=2: this job trains otherwise on parts of a batch")
    assert [word for word in words if word not in said] == []


def test_fsdp_compares_the_whole_model_too(golden: Golden) -> None:
    assert LOSS in warnings(DEPEND["contrastive"][0], FSDP)
    assert "1.codes" in warnings(DEPEND["codebook"][0], FSDP)
    assert warnings(DEPEND["contrastive"][0], FSDP, rank=1) == ""
    assert {name: warnings(job, FSDP) for name, job in EQUAL.items()} == dict.fromkeys(EQUAL, "")
    job, huge = EQUAL["plain"], nn.Linear(10**7, 10**7, device="meta")
    (said,) = built(job, FSDP).notes_on(huge, job.dataset("train"))
    golden.says(said.text)


@pytest.mark.parametrize("name", EQUAL)
def test_nobody_else_is_accused(name: str) -> None:
    assert warnings(EQUAL[name], DDP) == ""
    assert warnings(EQUAL[name], DDP, accumulation=2) == ""


@dataclass(frozen=True, kw_only=True)
class Coarse(OfBatches):
    """Its loss has the digits of its weights."""

    dtype: torch.dtype

    def model(self) -> nn.Module:
        return super().model().to(self.dtype)

    def forward(self, model: nn.Module, inputs: Tensor) -> Tensor:
        return model(inputs.to(self.dtype))

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return 1 + 0.002 * (output.new_tensor(len(output)) - 4).float()


def test_rounding_of_coarse_weights_is_no_difference() -> None:
    assert "the mean over" in warnings(Coarse(dtype=torch.float32), DDP)
    assert warnings(Coarse(dtype=torch.bfloat16), DDP) == ""


@dataclass(frozen=True, kw_only=True)
class InTurn(OfBatches):
    """The classes of the samples that are compared are 0, 2, 0, 2 and so on."""

    samples: int = 24
    loss_of: Callable[[Tensor, Tensor], Tensor] = class_weighted

    def item(self, index: int, inputs: Tensor, target: int) -> tuple[Tensor, int]:
        return inputs, index % 4


def test_halves_with_equal_classes_hide_no_weights_of_classes() -> None:
    assert LOSS in warnings(InTurn(), DDP)


@pytest.mark.parametrize("name", ["momentum teacher", "momentum teacher, by data"])
def test_a_teacher_that_begins_as_an_exact_copy_follows_once_for_each_part(name: str) -> None:
    job = job_of(f"hand/{name}")
    assert warnings(job, DDP) == ""
    assert "teacher.a.weight, teacher.a.bias" in warnings(job, SINGLE, replicas=1, accumulation=2)
    assert "teacher.a.weight, teacher.a.bias" in warnings(job, DDP, accumulation=2)


@pytest.mark.parametrize("name", DEPEND)
def test_nothing_is_said_where_nothing_is_divided(name: str) -> None:
    assert warnings(DEPEND[name][0], SINGLE, replicas=1) == ""


@pytest.mark.needs("asynchronous")
def test_a_loss_of_gathered_outputs_is_that_of_the_batch() -> None:
    """``dp`` computes it on the first device, unless each replica computes its own."""
    options, _ = STRATEGIES["dp"]
    job = OfBatches(loss_of=summed)
    assert warnings(job, options, replicas=1, devices=2) == ""
    assert "the mean over" in warnings(job, options, replicas=1, devices=2, accumulation=2)
    assert "the mean over" in warnings(job, replace(options, loss_on="replicas"), replicas=1, devices=2)
    assert "1.mean" in warnings(DEPEND["own batch norm"][0], options, replicas=1, devices=2)


@pytest.mark.needs("asynchronous")
def test_asynchronous_workers_have_losses_of_their_own() -> None:
    options, _ = STRATEGIES["hogwild"]
    assert warnings(OfBatches(loss_of=contrastive), options) == ""
    assert "1.highest" in warnings(DEPEND["observer"][0], options)


@pytest.mark.parametrize("name", ["own batch norm", "codebook", "spectral norm", "step counter"])
def test_the_model_and_the_generators_are_left_as_they_are(name: str) -> None:
    def state(rank: int) -> list[Any]:
        tensors = built(DEPEND[name][0], DDP, accumulation=2, rank=rank).trained.module().state_dict()
        numpy_state = [part.tolist() if isinstance(part, np.ndarray) else part for part in np.random.get_state()]
        return [
            {n: t.tolist() for n, t in tensors.items()},
            torch.get_rng_state().tolist(),
            random.getstate(),
            numpy_state,
        ]

    assert state(0) == state(1), "only rank 0 compares"


def test_plain_attributes_of_the_model_are_left_as_they_are() -> None:
    assert built(EQUAL["counts calls"], DDP).trained.module()[1].calls == 0


def failing(output: Any, target: Any) -> Tensor:
    raise RuntimeError("not here")


def test_what_cannot_be_compared_is_said() -> None:
    said = warnings(OfBatches(loss_of=failing), DDP)
    assert "the loss of a batch was not compared with those of its halves (RuntimeError: " in said


def summed_over_workers(output: Any, target: Any) -> Tensor:
    dist.all_reduce(output)
    return output.mean()


def test_rank_0_does_not_wait_for_others(tmp_path: Path, golden: Golden) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        said = warnings(OfBatches(loss_of=summed_over_workers), DDP)
        golden.says(said)
    finally:
        dist.destroy_process_group()


class Sorted(OfBatches):
    """The samples of a class follow one another, as in a folder of images for each class."""

    def dataset(self, split: Split) -> Dataset[Any]:
        return Rows(sorted(super().dataset(split), key=lambda item: item[1]))


def test_samples_of_a_sorted_data_set_differ() -> None:
    assert "the mean over" in warnings(Sorted(loss_of=class_weighted), DDP)


@pytest.mark.slow
def test_pipelines_compare_the_whole_model() -> None:
    """On rank 0, also if it is a sequence of layers whose stages need no comparison."""
    said = {name: pipeline_warnings(job) for name, (job, _, _) in DEPEND.items()}
    assert {name: [word for word in words if word not in said[name]] for name, (_, _, words) in DEPEND.items()} == {
        name: [] for name in DEPEND
    }
    assert {name: pipeline_warnings(job) for name, job in EQUAL.items()} == dict.fromkeys(EQUAL, "")


def pipeline_warnings(job: Job) -> str:
    config = config_of(Case(job=job, train=replace(TRAIN, global_batch_size=16), options=pipeline("1F1B", 2)), 2)
    plan = plan_of(config)
    context = Context(
        mesh=plan.mesh,
        global_rank=0,
        device=CPU,
        seed=3,
        train=config.train,
        options=config.strategy,
        collective_timeout_s=1,
        pipeline=plan.pipeline,
    )
    strategy, train_set = MeshTrainer(context, job), job.dataset("train")
    strategy.setup(train_set)
    return "\n".join(remark.text for remark in strategy.setup_warnings())

"""A job that overrides ``Job.training_step`` is refused before anything starts where it cannot be trained."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.files.golden import Golden
from helpers.jobs.step_toys import GAN, Models, ScheduledGAN
from helpers.jobs.toys import Toy
from orchestrator.config.build import ConfigError
from orchestrator.config.job_loader import load_job
from orchestrator.config.schema import JobSpec
from orchestrator.driver.checked_runs import CheckedRun, check_all
from orchestrator.job import Job, has_loss
from orchestrator.records import run_dir as rundir
from orchestrator.records.lock import this_process
from orchestrator.state.checkpoint import save
from orchestrator.state.train_state import capture
from orchestrator.strategies.data.datasets import DatasetError
from orchestrator.strategies.training_step import joined, optimizers_of
from orchestrator.worker.data.opened import datasets_of


@pytest.fixture
def checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def checked(job: type[Job], *words: str) -> CheckedRun:
        target = f"job._target_={job.__module__}.{job.__qualname__}"
        (checked_run,) = check_all([[f"output_dir={tmp_path}", "tracking=none", target, *words]])
        return checked_run

    return checked


class WithoutForward(GAN):
    def loss(self, output: Any, target: Any) -> Tensor:
        raise NotImplementedError


@pytest.mark.slow
def test_what_does_not_go_together(checked: Any, golden: Golden) -> None:
    def errors(job: str, *words: str) -> str:
        with pytest.raises(ConfigError) as error:
            checked({"GAN": GAN, "WithoutForward": WithoutForward}[job], *words)
        return "\n".join(error.value.errors)

    golden.answers("errors/training-step", errors)


@pytest.mark.parametrize("words", ["strategy=single", "strategy=ddp", "strategy=ddp strategy.sync_batchnorm=true"])
def test_what_does(checked: Any, words: str) -> None:
    assert checked(GAN, *words.split()).sizes is not None


@pytest.mark.slow
def test_a_resume_compares_the_optimizers(checked: Any, tmp_path: Path, golden: Golden) -> None:
    job = ScheduledGAN()
    run = rundir.create(tmp_path, "gan")
    run.update_record(name="gan", uid="first", state="failed", driver=this_process())
    model = job.model()
    state = capture(model, joined(optimizers_of(job, model)), None, step=3, samples_consumed=192)
    save(run.checkpoints, state, run_uid="first")
    assert checked(ScheduledGAN, f"resume={run.path}").resume.step == 3
    with golden.raises(ConfigError, RUN=run.path):
        checked(GAN, f"resume={run.path}")


# What such a job may leave out


class Neither(Job):
    def model(self) -> nn.Module: ...

    def dataset(self, split: str) -> Any:
        return [(torch.ones(1), torch.ones(1))]


class WithStep(Neither):
    def training_step(self, models: Models, batch: Any, optimizers: Any) -> Any: ...


class WithStepAndOptimizers(WithStep):
    def optimizers(self, models: Models) -> Mapping[str, Any]: ...


class WithOptimizers(Neither):
    def optimizers(self, models: Models) -> Mapping[str, Any]: ...


class WithLoss(WithStepAndOptimizers):
    def loss(self, output: Any, target: Any) -> Tensor: ...


@pytest.mark.parametrize(
    ("job", "missing"),
    [
        (Neither, "loss(), optimizer()"),
        (WithOptimizers, "loss(), optimizer()"),
        (WithStep, "optimizer()"),
        (WithStepAndOptimizers, None),
        (WithLoss, None),
    ],
)
def test_only_a_job_with_a_training_step_may_leave_out_loss_and_optimizer(job: type[Job], missing: str | None) -> None:
    target = f"{__name__}.{job.__name__}"
    errors: list[str] = []
    load_job(JobSpec(target=target, fields={}), errors)
    assert errors == ([] if missing is None else [f"job._target_={target}: the class has to define {missing}"])


def test_a_job_without_a_loss_has_no_validation_set(golden: Golden) -> None:
    assert has_loss(Toy())
    assert not has_loss(GAN())
    assert datasets_of(GAN(), ["val"]).evaluated == {}
    with golden.raises(ValueError):
        datasets_of(WithStepAndOptimizers(), ["val"])
    with golden.raises(ValueError):
        datasets_of(WithStepAndOptimizers(), ["train"])
    assert datasets_of(WithStepAndOptimizers(), []).evaluated == {}
    assert datasets_of(WithLoss(), ["val"]).evaluated.keys() == {"val"}


class WithoutOthers(WithLoss):
    def dataset(self, split: str) -> Any:
        return super().dataset(split) if split == "train" else None


def test_only_the_validation_set_may_be_missing(golden: Golden) -> None:
    with golden.raises(DatasetError):
        datasets_of(WithoutOthers(), ["val", "test"])
    datasets = datasets_of(WithoutOthers(), ["train", "val"])
    assert datasets.evaluated == {"train": datasets.train}


class Frozen(GAN):
    """Its generator is not trained."""

    def model(self) -> nn.Module:
        model = super().model()
        model.get_submodule("generator").requires_grad_(False)
        return model


def test_a_frozen_model_gets_no_optimizer() -> None:
    job = Frozen()
    assert list(optimizers_of(job, job.model())) == ["discriminator"]

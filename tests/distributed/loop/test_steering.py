"""Evaluations steer a run: in every layout, after a resume in another one, and after steps that are repeated."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LinearLR, LRScheduler, ReduceLROnPlateau
from torch.utils.data import Dataset, IterableDataset, default_collate

from helpers.conformance.cases import CHECKPOINT, Case, config_of, having
from helpers.conformance.layouts import CONTEXT, LAYOUTS, TENSOR
from helpers.conformance.training import close_strategies, make
from helpers.jobs.quick_jobs import QuickDigits, TinyGPT
from helpers.jobs.toys import Rows
from helpers.ranks.gang import Gang
from helpers.ranks.loops import Ran, losses_by_step, run_loop
from helpers.records.runs import in_campaign
from orchestrator import Evaluation, Steering
from orchestrator.protocol.messages import EvalPoint, TrainPoint
from orchestrator.strategies.trainer import Trainer
from orchestrator.user_code.errors import JobError
from orchestrator.worker.reports.after_evaluation import EVALUATIONS, Steered
from orchestrator.worker.reports.evaluation import MetricError

LR, STEPS, EVERY = 0.1, 8, 2
TRAIN = having(steps=STEPS, global_batch_size=32, eval_every=EVERY)


@dataclass(frozen=True, kw_only=True)
class SteeredDigits(QuickDigits):
    """Divides its rates by 4 at each evaluation and changes ``scale``, or asks for what ``asks`` has."""

    hidden: int = 24
    val_size: int | None = 40
    scale: float = 1.0
    asks: Any = None

    steerable: ClassVar[tuple[str, ...]] = ("scale",)

    def scheduler(self, optimizer: Optimizer, steps: int) -> LRScheduler | None:
        return LinearLR(optimizer, 1.0, 0.5, total_iters=steps)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return self.scale * super().loss(output, target)

    def metrics(self, output: Tensor, target: Tensor) -> Mapping[str, Tensor]:
        return {"scale": torch.tensor(self.scale * len(target))}

    def on_evaluation(self, evaluations: Sequence[Evaluation]) -> Steering | None:
        if self.asks is not None:
            return self.asks  # type: ignore[no-any-return]
        assert all(evaluation.metrics["val/loss"] > 0 for evaluation in evaluations)
        count = len(evaluations)
        return Steering(lr_factor=0.25**count, fields={"scale": 1.0 + count}, stop="enough" if count == 4 else None)


@dataclass(frozen=True, kw_only=True)
class SteeredWords(TinyGPT):
    """Scales what it weighs, and what it trains on, by the number of its evaluations."""

    layers: int = 2
    temperature: float = 1.0
    steerable: ClassVar[tuple[str, ...]] = ("temperature",)

    def dataset(self, split: str) -> Any:
        windows = super().dataset(split)
        return windows if split == "train" else Rows([windows[i] for i in range(16)])

    def _weights(self, target: Tensor) -> Tensor:
        return torch.where(target % 2 == 0, self.temperature, 1.0)

    def weight(self, target: Tensor) -> Tensor:
        return self._weights(target).sum()

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        losses = cross_entropy(output.flatten(0, 1), target.flatten(), reduction="none")
        weights = self._weights(target).flatten()
        return (losses * weights).sum() / weights.sum()

    def on_evaluation(self, evaluations: Sequence[Evaluation]) -> Steering:
        return Steering(fields={"temperature": 0.25 ** len(evaluations)})


@dataclass(frozen=True, kw_only=True)
class SteeredForward(SteeredWords):
    def forward(self, model: Any, inputs: Any) -> Any:
        return model(inputs) * self.temperature


@dataclass(frozen=True, kw_only=True)
class PlateauDigits(QuickDigits):
    """Halves its rates at each evaluation after the first, none of which is good enough for ``threshold``."""

    hidden: int = 24
    val_size: int | None = 40

    def scheduler(self, optimizer: Optimizer, steps: int) -> Any:
        return ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.9)


def rates(ranks: Sequence[Ran]) -> dict[int, float]:
    """The learning rate after each step on the ranks, which have the same."""
    found = [{p.step: p.metrics["train/lr"].value for p in rank.points if isinstance(p, TrainPoint)} for rank in ranks]
    assert all(of_rank in ({}, found[0]) for of_rank in found)
    return found[0]


def evaluated(ranks: Sequence[Ran]) -> dict[int, float]:
    """``val/scale`` by step."""
    points = [p for rank in ranks for p in rank.points if isinstance(p, EvalPoint)]
    steps = {p.step for p in points}
    return {s: sum(p.sums.get("scale", 0.0) for p in points if p.step == s) / 40 for s in steps}


def expected_rate(step: int, *, made: int) -> float:
    """The rate of the update after ``step``, whose evaluation is the ``made``-th and has not been made yet."""
    return LR * (1 - 0.5 * step / (STEPS + 4)) * 0.25**made


def run(gang: Gang, job: Any, name: str, run_dir: Path, *, checkpoint: str | None = None, steps: int = STEPS) -> Any:
    layout = LAYOUTS[name]
    case = layout.of(Case(job=job, train=replace(TRAIN, steps=steps)))
    path = None if checkpoint is None else run_dir / "checkpoints" / checkpoint
    return gang.run(run_loop, case, run_dir, path, EVERY, world_size=layout.world_size)


@pytest.mark.parametrize(
    "name", ["ddp-2", "1F1B-2", *in_campaign("single", "sharded-ddp-2", "fsdp-2", "parameter_server-2+2")]
)
def test_rates_fields_and_the_end_follow_in_every_layout_and_after_a_resume_in_another(
    gang: Gang, tmp_path: Path, name: str
) -> None:
    whole = run(gang, SteeredDigits(), name, tmp_path, steps=STEPS + 4)
    assert {(r.outcome.status, r.outcome.step) for r in whole} == {("done", STEPS)}
    assert {r.outcome.ended_early for r in whole} == {"Job.on_evaluation: enough"}
    assert rates(whole) == pytest.approx({s: expected_rate(s, made=(s - 1) // EVERY) for s in range(1, STEPS + 1)})
    assert evaluated(whole) == pytest.approx({2: 1.0, 4: 2.0, 6: 3.0, 8: 4.0})
    other = "1F1B-2" if name == "single" else "single"
    rest = run(gang, SteeredDigits(), other, tmp_path, checkpoint="step-00000004", steps=STEPS + 4)
    assert {r.outcome.ended_early for r in rest} == {"Job.on_evaluation: enough"}
    before, after = losses_by_step(whole), losses_by_step(rest)
    assert [*after] == [5, 6, 7, 8]
    assert [*after.values()] == pytest.approx([before[step] for step in after], rel=1e-5)
    assert rates(rest) == pytest.approx({step: rates(whole)[step] for step in after})


@pytest.mark.parametrize("name", ["1F1B-2", *in_campaign("single", "ddp-2")])
def test_a_scheduler_that_follows_a_metric_is_stepped_after_each_evaluation(
    gang: Gang, tmp_path: Path, name: str
) -> None:
    whole = run(gang, PlateauDigits(), name, tmp_path)
    assert rates(whole) == pytest.approx({s: LR * 0.5 ** max(0, (s - 1) // EVERY - 1) for s in range(1, STEPS + 1)})
    rest = run(gang, PlateauDigits(), "single", tmp_path, checkpoint="step-00000004")
    assert rates(rest) == pytest.approx({step: rates(whole)[step] for step in (5, 6, 7, 8)})
    longer = run(gang, PlateauDigits(), "single", tmp_path, checkpoint="step-00000006", steps=STEPS + 2)
    assert [rates(longer)[s] for s in (7, 8)] == pytest.approx([rates(whole)[s] for s in (7, 8)])


IN_PARTS = [
    (SteeredWords, "mesh-context-2"),
    (SteeredWords, "1F1B-2"),
    (SteeredForward, "mesh-tensor-2"),
    (SteeredForward, "fsdp-2"),
]


@pytest.mark.parametrize(
    ("kind", "name"),
    [(SteeredForward, "mesh-context-2"), *in_campaign((SteeredWords, "context-in-stages-2x2"), *IN_PARTS)],
)
def test_where_layers_and_tokens_are_divided_the_job_is_steered_too(
    gang: Gang, tmp_path: Path, kind: type[SteeredWords], name: str
) -> None:
    def losses(layout: str) -> tuple[list[float], list[float]]:
        of = {**LAYOUTS, **TENSOR, **CONTEXT}[layout]
        case = of.of(Case(job=kind(), train=having(TRAIN, steps=6, global_batch_size=8)))
        ranks = gang.run(run_loop, case, tmp_path / layout, world_size=of.world_size)
        points = [p for rank in ranks for p in rank.points if isinstance(p, EvalPoint)]
        sums = {p.step: [q for q in points if q.step == p.step] for p in points}
        evaluations = [sum(p.loss_sum for p in ps) / sum(p.weight for p in ps) for ps in sums.values()]
        return [*losses_by_step(ranks).values()], evaluations

    expected, found = losses("single"), losses(name)
    assert found[0] == pytest.approx(expected[0], rel=2e-4)
    assert found[1] == pytest.approx(expected[1], rel=2e-4)


class Scales(Dataset[Any]):
    """Samples with the scale that the job has when they are read."""

    def __init__(self, job: ScaledData, items: Sequence[Any]):
        self.job, self.items = job, items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        inputs, target = self.items[index]
        return inputs, (target, self.job.scale)


class ScaleStream(IterableDataset[Any]):
    def __init__(self, samples: Scales):
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return (self.samples[index] for index in range(len(self.samples)))


def scaled(scale: float, items: list[Any]) -> Any:
    inputs, (targets, _) = default_collate(items)
    return inputs, (targets, torch.full((len(items),), scale))


@dataclass(frozen=True, kw_only=True)
class ScaledData(SteeredDigits):
    """Its samples tell the scale that they were made with."""

    where: str = "dataset"

    def dataset(self, split: str) -> Any:
        samples = Scales(self, super().dataset(split).items)
        return ScaleStream(samples) if self.where == "stream" else samples

    @property
    def collate(self) -> Any:
        return functools.partial(scaled, self.scale) if self.where == "collate" else None

    def loss(self, output: Tensor, target: Any) -> Tensor:
        return super().loss(output, target[0])

    def metrics(self, output: Tensor, target: Any) -> Mapping[str, Tensor]:
        return {"scale": target[1].sum()}

    train_metrics = metrics

    def on_evaluation(self, evaluations: Sequence[Evaluation]) -> Steering:
        return Steering(fields={"scale": self.scale + len(evaluations)})


@pytest.mark.parametrize(
    ("where", "loaders"),
    [("dataset", 2), ("collate", 0), ("stream", 2), *in_campaign(("dataset", 0), ("collate", 2), ("stream", 0))],
)
def test_samples_are_made_with_the_fields_of_their_step(gang: Gang, tmp_path: Path, where: str, loaders: int) -> None:
    """Whatever loader processes have, and have read ahead; and so they are after a resume."""
    case = Case(job=ScaledData(where=where), train=TRAIN, loaders=loaders)

    def seen(checkpoint: str | None) -> tuple[dict[int, float], dict[int, float]]:
        (ran,) = gang.run(run_loop, case, tmp_path, checkpoint, EVERY, world_size=1)
        points = [p for p in ran.points if isinstance(p, TrainPoint)]
        return {p.step: p.sums["scale"] / p.step_weight for p in points}, evaluated([ran])

    expected = {step: 1.0 + (step - 1) // EVERY for step in range(1, STEPS + 1)}
    trained, evaluations = seen(None)
    assert trained == expected
    assert evaluations == {step: expected[step] for step in (2, 4, 6, 8)}
    trained, evaluations = seen(str(tmp_path / "checkpoints" / "step-00000004"))
    assert trained == {step: expected[step] for step in (5, 6, 7, 8)}
    assert evaluations == {step: expected[step] for step in (6, 8)}


def steered(job: QuickDigits, *, best: str | None = None) -> tuple[Steered, Trainer]:
    checkpoint = replace(CHECKPOINT, best=best, best_direction="minimize")
    case = Case(job=job, train=TRAIN, checkpoint=checkpoint)
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    strategy = make(case, dist.get_rank() if world_size > 1 else 0)
    assert isinstance(strategy, Trainer)
    return Steered(config_of(case, world_size), job, strategy, device=torch.device("cpu")), strategy


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    close_strategies()


def add(followed: Steered, step: int, loss: float = 1.0) -> None:
    point = EvalPoint(step=step, time=0.0, loss_sum=loss, weight=1.0, sums={})
    followed.add(point, rank=0, world_size=1, confirm=lambda: None)


def test_evaluations_after_the_step_from_which_a_run_continues_have_no_effect() -> None:
    job = SteeredDigits()
    followed, strategy = steered(job)
    for step in (2, 4, 6, 8):
        add(followed, step)
    assert strategy.group_lrs[0] == pytest.approx(LR / 256)
    assert (job.scale, followed.why_stop) == (5.0, "Job.on_evaluation: enough")
    followed.share([0], source_step=5, rank=0)
    assert (strategy.group_lrs[0], job.scale, followed.why_stop) == (pytest.approx(LR / 16), 3.0, None)
    add(followed, 4)  # the failure came before the end of what followed from it
    assert strategy.group_lrs[0] == pytest.approx(LR / 16)
    assert [found["step"] for found in followed.metadata()[EVALUATIONS]] == [2, 4]
    followed.share([0], source_step=0, rank=0)
    assert (strategy.group_lrs[0], job.scale) == (pytest.approx(LR), 1.0)


def shared(rank: int) -> tuple[float, float, list[int]]:
    """Rank 0 is new after the evaluation of step 4. What it and the survivor go on with, from step 5."""
    job = SteeredDigits()
    followed, strategy = steered(job)
    for step in (2, 4) if rank == 1 else ():
        followed._evaluations.append(Evaluation(step=step, metrics={"val/loss": 1.0}))
    followed.share([1, 1], source_step=5, rank=rank)
    return strategy.group_lrs[0], job.scale, [evaluation["step"] for evaluation in followed.metadata()[EVALUATIONS]]


def test_an_evaluation_that_is_repeated_has_the_fields_of_its_step() -> None:
    job = SteeredDigits()
    followed, _ = steered(job)
    for step in (2, 4):
        add(followed, step)
    followed.rewind(6, rank=0, world_size=1)
    assert job.scale == 3.0
    followed.rewind(4, rank=0, world_size=1)
    assert job.scale == 2.0


@pytest.mark.parametrize("name", ["single", *in_campaign("fsdp-2", "1F1B-2")])
def test_a_checkpoint_is_evaluated_with_the_fields_that_it_was_trained_with(
    gang: Gang, tmp_path: Path, name: str
) -> None:
    run(gang, SteeredDigits(), "single", tmp_path)
    of, checkpoint = LAYOUTS[name], tmp_path / "checkpoints" / "step-00000006"
    train = replace(TRAIN, steps=6, eval_splits=("val",))
    case = of.of(Case(job=SteeredDigits(), train=train, evaluate="the run"))
    ranks = gang.run(run_loop, case, tmp_path / "other", checkpoint, world_size=of.world_size)
    assert evaluated(ranks) == pytest.approx({6: 3.0})


def test_a_new_worker_goes_on_as_the_survivor(gang: Gang) -> None:
    assert gang.run(shared, world_size=2) == [(pytest.approx(LR / 16), 3.0, [2, 4])] * 2


def test_without_evaluations_it_is_said_that_nothing_follows() -> None:
    followed, _ = steered(SteeredDigits())
    assert followed.note(evaluates=True) is None
    assert "set train.eval_every" in str(followed.note(evaluates=False))
    assert steered(QuickDigits())[0].note(evaluates=False) is None


def test_a_run_that_starts_from_another_one_is_steered_by_its_own_evaluations() -> None:
    first, strategy = steered(PlateauDigits())
    for step in (2, 4, 6):
        add(first, step)
    assert strategy.group_lrs[0] == pytest.approx(LR / 4)
    state = strategy.trained.snapshot(step=6, samples_consumed=0)
    other, continued = steered(PlateauDigits())
    continued.load(state)
    other.restore(None, rank=0, world_size=1)
    assert continued.group_lrs[0] == pytest.approx(LR / 4)
    add(other, 2)
    assert continued.group_lrs[0] == pytest.approx(LR / 8)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(JobError, match=r"job\.on_evaluation changes hidden, not in Job\.steerable; name them there"):
        add(steered(SteeredDigits(asks=Steering(fields={"hidden": 3})))[0], 2)
    for wrong in ({"lr_factor": float("nan")}, {"lr_factor": -1}, {"stop": ""}, {"fields": {"scale": {1, 2}}}):
        (name,) = wrong
        with pytest.raises(JobError, match=rf"Steering\({name}="):
            Steering(**wrong)  # type: ignore[arg-type]


def test_a_metric_that_no_evaluation_reports_is_refused_in_the_trial() -> None:
    with pytest.raises(MetricError, match=r"ReduceLROnPlateau follows val/lss \(checkpoint\.best, or val/loss\): no"):
        steered(PlateauDigits(), best="val/lss")[0].check({"val/loss": 1.0})

"""What a run tries out after its first step, and what a last evaluation that fails leaves behind."""

from __future__ import annotations

import errno
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from helpers.conformance.cases import CHECKPOINT, Case, assignment, having
from helpers.conformance.layouts import EVERY
from helpers.conformance.training import CPU
from helpers.jobs.toys import Rows, Toy
from helpers.ranks.gang import SOON_S
from helpers.ranks.loops import loop_of, run_loop
from helpers.ranks.streams import Counting
from helpers.records.runs import in_campaign
from orchestrator.job import Split
from orchestrator.protocol.core_metrics import evaluation_metrics
from orchestrator.protocol.events import BestFound
from orchestrator.protocol.messages import EvalPoint, Failure, TrainPoint
from orchestrator.state.checkpoint import list_checkpoints, load
from orchestrator.strategies import registry
from orchestrator.worker.control.rendezvous import context_of
from orchestrator.worker.failures import describe_failure


class Counted(nn.Module):
    """Counts its calls, in an evaluation too."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls.add_(1)
        return inputs


class Drawing(Rows):
    def __getitem__(self, index: int) -> Any:
        drawn = torch.rand(()) + random.random() + np.random.rand()
        inputs, target = super().__getitem__(index)
        return inputs + 1e-3 * drawn, target


@dataclass(frozen=True, kw_only=True)
class Watched(Toy):
    """Shows what an evaluation changes: buffers, random numbers, a stream that counts its iterators."""

    streams: bool = False
    dropout: float = 0.5

    def model(self) -> nn.Module:
        dropout = nn.Dropout(self.dropout)
        return nn.Sequential(nn.Linear(10, 16), Counted(), dropout, nn.Linear(16, 16), Counted(), nn.Linear(16, 4))

    def dataset(self, split: Split) -> Dataset[Any]:
        rows = super().dataset(split)
        if split == "train":
            return rows
        return Counting(rows.items) if self.streams else Drawing(rows.items[:21])

    def metrics(self, output: Tensor, target: Tensor) -> Mapping[str, Tensor]:
        return {"accuracy": (output.argmax(dim=-1) == target).sum()}


@pytest.mark.parametrize(
    ("name", "streams"),
    [
        ("fsdp-2", False),
        ("ddp-2", True),
        *in_campaign(*((n, False) for n in ("single", "dp-2", "sharded-ddp-2", "1F1B-2", "parameter_server-2+2"))),
    ],
)
def test_no_number_of_the_run_depends_on_a_trial(gang, tmp_path, name, streams):
    layout = EVERY[name]
    train = having(steps=4, global_batch_size=12, eval_every=3)
    dropout = 0.0 if name == "dp-2" else 0.5  # its threads draw from one generator
    case = layout.of(Case(job=Watched(streams=streams, dropout=dropout), train=train))
    found = []
    for splits in (("val",), ()):
        one, run_dir = replace(case, train=replace(train, eval_splits=splits)), tmp_path / f"{len(splits)}"
        ranks = gang.run(run_loop, one, run_dir, None, 2, world_size=layout.world_size)
        points = [[(p.step, p.loss_sum) for p in r.points if isinstance(p, TrainPoint)] for r in ranks]
        found.append((points, load(list_checkpoints(run_dir / "checkpoints")[0])))
        assert all(p.step >= 3 for r in ranks for p in r.points if isinstance(p, EvalPoint))
    (points, state), (expected, without) = found
    assert points == expected
    assert state.step == without.step == 2
    assert state.model.keys() == without.model.keys()
    assert "1.calls" in state.model
    assert all(torch.equal(state.model[name], tensor) for name, tensor in without.model.items())


@dataclass(frozen=True, kw_only=True)
class Failing(Toy):
    """Its evaluation fails: of the last batch, which has three valid rows, or of every one."""

    what: str

    def dataset(self, split: Split) -> Dataset[Any]:
        rows = super().dataset(split)
        if split == "train":
            return rows
        return Rows([*rows.items[:20], None if self.what == "sample" else rows.items[20]])

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        self.fail("loss", len(target) == 3 and not output.requires_grad)
        return super().loss(output, target)

    def metrics(self, output: Tensor, target: Tensor) -> Mapping[str, Any]:
        self.fail("metrics", len(target) == 3)
        return {"loss" if self.what == "name" else "hits": target if self.what == "shape" else target.sum()}

    def fail(self, what: str, now: bool) -> None:
        if now and what == self.what:
            raise ZeroDivisionError("planned")


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("sample", "val data, collating samples [18, 19, 20]: the dataset returns None for sample 20; "),
        ("loss", "ZeroDivisionError: planned (in a trial of the evaluation, which would fail later)"),
        ("metrics", "ZeroDivisionError: planned (in a trial of the evaluation, which would fail later)"),
        ("name", "job.metrics: the run itself logs a metric named 'loss'"),
        ("shape", "job.metrics: 'hits' is a tensor of shape (6,)"),
        ("best", "checkpoint.best=val/acc: no evaluation reports it; "),
    ],
)
def test_what_would_fail_later_ends_the_run_after_the_first_step(tmp_path, what, message):
    checkpoint = replace(CHECKPOINT, best="val/acc", best_direction="maximize") if what == "best" else CHECKPOINT
    train = having(steps=40, global_batch_size=6, eval_every=0)
    failure = failure_of(Case(job=Failing(what=what), train=train, checkpoint=checkpoint), tmp_path)
    assert failure.message.startswith(message)
    assert failure.final


def failure_of(case: Case, tmp_path: Path) -> Failure:
    """What the driver is told of an error after the first step."""
    orders = assignment(rank=0, world_size=1, generation=1, store_port=0, run_dir=str(tmp_path), case=case)
    loop = loop_of(orders, case, registry.load("single").create(context_of(orders, CPU), case.job))
    with pytest.raises(Exception) as raised:  # noqa: PT011
        loop.run({})
    loop.finish(timeout_s=60)
    assert loop.position.step == 1
    return describe_failure(raised.value, orders, loop, tmp_path / "log", after_abort=False)


class Score:
    """The share of the samples of class 0; ``what`` fails."""

    def __init__(self, what: str):
        self.what, self.seen, self.found = what, 0, 0

    def update(self, output: Tensor, target: Tensor) -> None:
        self.fail("update")
        self.seen, self.found = self.seen + len(target), self.found + int((target == 0).sum())

    def merge(self, other: Score) -> None:
        self.fail("merge")
        self.seen, self.found = self.seen + other.seen, self.found + other.found

    def compute(self) -> Any:
        self.fail("compute", now=self.seen < 21)
        return {"accuracy" if self.what == "taken" else "share": self.found / self.seen}

    def fail(self, what: str, *, now: bool = True) -> None:
        if now and what == self.what:
            raise ZeroDivisionError("planned")


@dataclass(frozen=True, kw_only=True)
class Scored(Watched):
    what: str

    def metric_objects(self, split: Split) -> Mapping[str, Any]:
        return {"score": Score(self.what)}


BEST_SHARE = replace(CHECKPOINT, best="val/share", best_direction="maximize")


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("update", "ZeroDivisionError: planned"),
        ("merge", "JobError: job.metric_objects: 'score' (Score) cannot be merged: planned"),
        ("taken", "JobError: job.metric_objects: 'score' computes 'accuracy', and so does another metric; rename one"),
    ],
)
def test_metric_objects_are_tried(gang, tmp_path, what, message):
    case = EVERY["ddp-2"].of(Case(job=Scored(what=what), train=having(steps=40, global_batch_size=12)))
    answers = gang.ask(run_loop, case, tmp_path, world_size=2, timeout_s=SOON_S)
    assert answers[0].error.startswith(message)


@pytest.mark.parametrize("name", ["single", "1F1B-2"])
def test_a_metric_that_needs_more_samples_is_only_named_in_a_trial(gang, tmp_path, name):
    layout = EVERY[name]
    train = having(steps=6, global_batch_size=8, eval_every=4)
    case = layout.of(Case(job=Scored(what="compute", dropout=0), train=train, checkpoint=BEST_SHARE))
    ranks = gang.run(run_loop, case, tmp_path, world_size=layout.world_size)
    (warning,) = [w for r in ranks for w in r.warnings if "metric_objects" in w]
    assert warning.startswith(
        "job.metric_objects: 'score' cannot be computed in a trial with a few samples: ZeroDivisionError: planned (test"
    )
    evaluations = [[p for p in r.points if isinstance(p, EvalPoint)] for r in ranks]
    found = [evaluation_metrics(list(parts))["val/share"] for parts in zip(*evaluations, strict=True)]
    assert len(found) == 2
    assert 0 < found[0] == found[1] < 1
    assert [event.step for event in ranks[0].events if isinstance(event, BestFound)] == [4]


class OnBadDisk(Failing):
    def fail(self, what: str, now: bool) -> None:
        if now and what == self.what:
            raise OSError(errno.EIO, "planned")


def test_a_machine_that_fails_in_a_trial_does_not_end_the_run(tmp_path):
    case = Case(job=OnBadDisk(what="loss"), train=having(steps=40, global_batch_size=6, eval_every=0))
    failure = failure_of(case, tmp_path)
    assert not failure.final
    assert failure.message.startswith("OSError: [Errno 5] planned (test_trials.py:")


@pytest.mark.parametrize(
    ("name", "what", "message"),
    [
        ("ddp-2", "name", "JobError: job.metrics: the run itself logs a metric named 'loss'"),
        ("fsdp-2", "name", "JobError: job.metrics: the run itself logs a metric named 'loss'"),
        ("1F1B-2", "sample", "JobError: val data, collating samples [12, "),
    ],
)
def test_each_rank_tries_its_part(gang, tmp_path, name, what, message):
    layout = EVERY[name]
    case = layout.of(Case(job=Failing(what=what), train=having(steps=40, global_batch_size=12)))
    answers = gang.ask(run_loop, case, tmp_path, world_size=layout.world_size, timeout_s=SOON_S)
    assert all(answer.error.startswith(message) for answer in answers)
    assert list_checkpoints(tmp_path / "checkpoints") == []


class FailingAtLast(Toy):
    """An evaluation fails if the head has been trained for all steps."""

    def forward(self, model: nn.Module, inputs: Tensor) -> Tensor:
        if not model.training and self.steps_of(model) == 6:
            raise ZeroDivisionError("planned")
        if model.training:
            model.get_buffer("steps").add_(1)
        return model(inputs)

    def steps_of(self, model: nn.Module) -> int:
        return int(model.get_buffer("steps"))

    def model(self) -> nn.Module:
        model = super().model()
        model.register_buffer("steps", torch.zeros(()))
        return model


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_last_evaluation_that_fails_loses_nothing(gang, tmp_path, world_size):
    case = Case(job=FailingAtLast(), train=having(steps=6, global_batch_size=12))
    answers = gang.ask(run_loop, case, tmp_path, None, 4, world_size=world_size, timeout_s=SOON_S)
    assert all("planned" in answer.error or "closed" in answer.error for answer in answers)
    assert [load(path).step for path in list_checkpoints(tmp_path / "checkpoints")] == [4, 6]

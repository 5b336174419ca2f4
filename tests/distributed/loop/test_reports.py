"""What a job reports of its own training: metrics of batches, samples and callbacks, in the loop of every rank."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from helpers.conformance.cases import Case, having
from helpers.conformance.layouts import HOGWILD, LAYOUTS
from helpers.jobs.quick_jobs import MeasuredDigits
from helpers.jobs.stage_toys import plain
from helpers.jobs.toys import Toy
from helpers.ranks.gang import SOON_S, Gang
from helpers.ranks.loops import Ran, run_loop
from helpers.records.runs import in_campaign
from orchestrator.job import Split
from orchestrator.protocol.events import SampleSaved
from orchestrator.protocol.messages import EvalPoint, TrainPoint
from orchestrator.strategies.keys import MeshConfig
from orchestrator.user_code.callbacks import StepEnd

SEVEN = having(steps=7, global_batch_size=12, eval_every=3)


def run(gang: Gang, folder: Path, case: Case, world_size: int = 2) -> list[Ran]:
    return gang.run(run_loop, case, folder, world_size=world_size)


def layout(name: str, case: Case) -> tuple[Case, int]:
    if name == "hogwild-2":
        return replace(case, options=HOGWILD), 2
    return LAYOUTS[name].of(case), LAYOUTS[name].world_size


@pytest.mark.parametrize("name", ["ddp-2", "1F1B-2", *in_campaign("single", "parameter_server-2+2", "hogwild-2")])
def test_train_metrics_are_logged_at_logged_steps_and_measured_at_no_others(gang, tmp_path, name):
    case, world_size = layout(name, Case(job=MeasuredDigits(hidden=24), train=having(SEVEN, log_every=3)))
    ranks = run(gang, tmp_path, case, world_size)
    points = [[p for p in ran.points if isinstance(p, TrainPoint)] for ran in ranks]
    assert [p.step for p in points[0]] == [1, 3, 6, 7]
    for step in zip(*points, strict=True):
        assert sum(p.step_weight for p in step) == 12
        assert {name for p in step for name in p.sums} == {"accuracy", "large/share", "large/logit"}


class Scored(Toy):
    """Precision is no sum."""

    def metrics(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        hits = output.argmax(-1) == target
        return {"accuracy": hits.sum(), "precision": hits.sum() / len(hits)}

    def train_metrics(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        return self.metrics(output, target)


@pytest.mark.parametrize("name", ["ddp-2", *in_campaign("single", "1F1B-2")])
def test_a_metric_that_is_no_sum_is_told_once(gang, tmp_path, name):
    case, world_size = layout(name, Case(job=Scored(build=plain), train=having(SEVEN, eval_every=3)))
    told = [text for ran in run(gang, tmp_path, case, world_size) for text in ran.warnings if "not a sum" in text]
    assert sorted(text.partition(" is not")[0] for text in told) == [
        "job.metrics: 'precision'",
        "job.train_metrics: 'precision'",
    ]


class Noisy(Toy):
    """Training depends on random numbers, on modes and on buffers."""

    def model(self) -> nn.Module:
        layers = [nn.Linear(10, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 16), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(16, 4))


class Showing(Noisy):
    def sample(self, model: nn.Module, generator: torch.Generator) -> Mapping[str, str | Tensor]:
        assert not any(module.training for module in model.modules())
        assert not torch.is_grad_enabled()
        torch.rand(3)
        output = model(torch.randn(6, 10, generator=generator))
        return {"output": output.sigmoid(), "says": f"{float(output.sum()):.3f}"}

    def on_step_end(self, info: StepEnd) -> None:
        torch.rand(3)
        if info.model is not None:
            info.model.eval()(torch.ones(1, 10))


def seen(ranks: list[Ran]) -> list[list[Any]]:
    def values(point: TrainPoint | EvalPoint) -> tuple[Any, ...]:
        return type(point), point.step, point.loss_sum, point.weight

    return [[values(p) for p in ran.points] for ran in ranks]


@pytest.mark.parametrize(
    "name", ["fsdp-2", "1F1B-2x2", *in_campaign("ddp-2", "parameter_server-2+2", "single", "sharded-ddp-2", "1F1B-2")]
)
def test_training_is_the_same_bit_for_bit_and_one_rank_samples(gang, tmp_path, name):
    train = having(SEVEN, global_batch_size=16)
    plain, world_size = layout(name, Case(job=Noisy(), train=train))
    if isinstance(plain.options, MeshConfig) and plain.options.pipeline != 1:
        plain = replace(plain, options=replace(plain.options, split=("4",)))  # a measured cut may differ between runs
    expected = seen(run(gang, tmp_path / "plain", plain, world_size))
    ranks = run(gang, tmp_path / "showing", replace(plain, job=Showing()), world_size)
    assert seen(ranks) == expected
    files = [f"samples/step-00000{step}-{file}" for step in (3, 6, 7) for file in ("output.png", "says.txt")]
    assert [e.path for ran in ranks for e in ran.events if isinstance(e, SampleSaved)] == files
    assert sorted(str(p.relative_to(tmp_path / "showing")) for p in tmp_path.glob("showing/samples/*")) == files
    texts = [(tmp_path / "showing" / file).read_text() for file in files[1::2]]
    assert len(set(texts)) == 3, "the model learns between the samples"
    assert ranks[0].outcome.texts == {"says": texts[-1]}
    assert not any(ran.warnings for ran in ranks)
    assert all(ran.training for ran in ranks)


@dataclass(frozen=True, kw_only=True)
class Returning(Toy):
    """Returns or raises this as its sample."""

    what: Any

    def sample(self, model: nn.Module, generator: torch.Generator) -> Any:
        if isinstance(self.what, Exception):
            raise self.what
        return self.what


@pytest.mark.parametrize(
    ("what", "warning"),
    [
        (KeyError("mine"), "job.sample raised KeyError: 'mine' (test_reports.py, line "),
        (ConnectionError("a server"), "job.sample raised ConnectionError: a server (test_reports.py, line "),
        (3, "job.sample returned a int; return a text, or a dict of texts and images, at step 3"),
        ({"a": 3}, "job.sample: 'a' is a int; return texts, and images as tensors, at step 3"),
        ({"a/b": "text"}, "job.sample: 'a/b' cannot be the name of a sample; use at most 100 letters"),
        ({"../a": "text"}, "job.sample: '../a' cannot be the name of a sample"),
        (
            {"a": torch.ones(5, 4, 4)},
            "job.sample: 'a': a tensor of shape (5, 4, 4) is not an image; images have shape (H, W)",
        ),
    ],
)
def test_a_bad_sample_is_one_warning_and_training_continues(gang, tmp_path, what, warning):
    ranks = run(gang, tmp_path, Case(job=Returning(what=what), train=SEVEN))
    assert ranks[0].outcome.status == "done"
    (warned,) = [w for ran in ranks for w in ran.warnings]
    assert warned.startswith(warning)
    assert warned.endswith("at step 3: see the log of rank 0; training continues")
    assert seen(ranks) == seen(run(gang, tmp_path / "plain", Case(job=Toy(), train=SEVEN)))


def test_a_sample_that_cannot_be_written_is_a_warning(gang, tmp_path):
    (tmp_path / "samples").write_text("a file, where the folder belongs")
    (ran,) = run(gang, tmp_path, Case(job=Returning(what="To be"), train=SEVEN), 1)
    assert [w[: w.index(": [Errno")] for w in ran.warnings[:1]] == ["the sample 'sample' cannot be written"]
    assert ran.outcome.texts == {"sample": "To be"}, "the console shows it"


def test_a_text_needs_no_name_and_none_is_no_sample(gang, tmp_path):
    (ran,) = run(gang, tmp_path / "1", Case(job=Returning(what="To be"), train=SEVEN), 1)
    assert ran.outcome.texts == {"sample": "To be"}
    assert (tmp_path / "1" / "samples" / "step-000003-sample.txt").read_text() == "To be"
    (ran,) = run(gang, tmp_path / "2", Case(job=Returning(what=None), train=SEVEN), 1)
    assert (ran.outcome.texts, ran.warnings) == ({}, [])
    assert not (tmp_path / "2" / "samples").exists()


class Silent(Returning):
    @property
    def draws_samples(self) -> bool:
        return False


def test_a_job_that_draws_nothing_is_not_asked(gang, tmp_path):
    case = LAYOUTS["fsdp-2"].of(Case(job=Silent(what=KeyError("asked")), train=SEVEN))
    for ran in run(gang, tmp_path, case):
        assert (ran.outcome.status, ran.outcome.texts, ran.warnings) == ("done", {}, [])


class Unvalidated(Showing):
    def dataset(self, split: Split) -> Dataset[Any] | None:
        return super().dataset(split) if split == "train" else None


def test_samples_need_no_validation_set(gang, tmp_path):
    ranks = run(gang, tmp_path, Case(job=Unvalidated(), train=SEVEN))
    assert [e.step for e in ranks[0].events if isinstance(e, SampleSaved)] == [3, 3, 6, 6, 7, 7]
    (warning,) = ranks[0].warnings
    assert warning.endswith("no val/* metrics; train.eval_every=3 only sets when job.sample is called")


@dataclass(frozen=True, kw_only=True)
class Calling(Noisy):
    """Calls a function at the end of every step."""

    function: Callable[[StepEnd], object]

    def on_step_end(self, info: StepEnd) -> None:
        self.function(info)


def tell(folder: Path, info: StepEnd) -> None:
    with (folder / "steps").open("a") as file:
        has = "a model" if info.model is not None else "no model"
        file.write(f"{info.step}/{info.steps} {info.samples_seen} {float(info.loss):.6f} {info.lr} {has}\n")


@pytest.mark.parametrize("name", ["ddp-2", "1F1B-2", *in_campaign("single", "parameter_server-2+2", "hogwild-2")])
def test_rank_0_reports_each_step_to_the_job(gang, tmp_path, name):
    job = Calling(function=functools.partial(tell, tmp_path))
    case, world_size = layout(name, Case(job=job, train=having(SEVEN, global_batch_size=16)))
    ranks = run(gang, tmp_path, case, world_size)
    lines = [line.split(maxsplit=4) for line in (tmp_path / "steps").read_text().splitlines()]
    assert [line[0] for line in lines] == [f"{step}/7" for step in range(1, 8)]
    assert [int(line[1]) for line in lines] == [16 * step for step in range(1, 8)]
    assert {line[3] for line in lines} == {"0.1"}
    assert {line[4] for line in lines} == {"no model" if "1F1B" in name else "a model"}
    own = [p for p in ranks[0].points if isinstance(p, TrainPoint)]
    assert [line[2] for line in lines] == [f"{p.loss_sum / p.weight:.6f}" if p.weight else "nan" for p in own]
    assert not any(ran.warnings for ran in ranks)


def fail(info: StepEnd) -> None:
    torch.rand(3)
    raise ValueError("even" if info.step % 2 == 0 else "odd")


def fail_anew(info: StepEnd) -> None:
    raise ValueError(f"step {info.step}")


def test_an_error_in_a_callback_is_one_warning_for_each_text(gang, tmp_path):
    ranks = run(gang, tmp_path / "1", Case(job=Calling(function=fail), train=SEVEN))
    assert [w[: w.index(",")] for w in ranks[0].warnings] == [
        f"job.on_step_end raised ValueError: {text} (test_reports.py" for text in ("odd", "even")
    ]
    assert "in fail), at step 2: see the log of rank 0; training continues" in ranks[0].warnings[1]
    assert not ranks[1].warnings
    assert seen(ranks) == seen(run(gang, tmp_path / "2", Case(job=Noisy(), train=SEVEN)))
    (ran,) = run(gang, tmp_path / "3", Case(job=Calling(function=fail_anew), train=having(SEVEN, steps=20)), 1)
    assert len(ran.warnings) == 10
    assert ran.warnings[-1].endswith("training continues; further errors of job.on_step_end are not reported")


def spoil(info: StepEnd) -> None:
    assert info.model is not None
    if info.step == 2:
        next(info.model.parameters()).zero_()


def leave(info: StepEnd) -> None:
    raise SystemExit("enough")


@pytest.mark.parametrize(
    ("function", "error"),
    [
        (spoil, "ModelChangedError: job.on_step_end changed the parameter 0.weight; it runs on one rank only"),
        (leave, "SystemExit: enough"),
    ],
)
def test_a_changed_model_and_an_exit_end_the_run(gang, tmp_path, function, error):
    case = Case(job=Calling(function=function), train=SEVEN)
    answers = gang.ask(run_loop, case, tmp_path, world_size=2, timeout_s=SOON_S)
    assert answers[0].error.startswith(error)

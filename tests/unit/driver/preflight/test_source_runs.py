"""Runs that begin with a checkpoint of another run: to evaluate it, or to train on from it."""

import gc
import itertools
import os
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch import nn

from helpers.files.golden import Golden
from helpers.records.earlier_runs import JOB, an_earlier_run, config_of, refused, save_steps
from jobs.digits import Digits
from orchestrator.config.build import ConfigError
from orchestrator.config.redact import Redactor
from orchestrator.driver.preflight.resume import Resume, find_resume, find_source
from orchestrator.records.lock import this_process
from orchestrator.state.best import BestSoFar
from orchestrator.state.checkpoint import load, prune, step_of, verify
from orchestrator.state.manifest import read_manifest


def source(tmp_path: Path, *words: str, warnings: list[str] | None = None) -> Resume | None:
    warnings = [] if warnings is None else warnings
    return find_source(config_of(tmp_path, *words), JOB, warnings=warnings, redactor=Redactor())


@pytest.mark.parametrize("key", ["evaluate", "start_from"])
def test_a_new_run_begins_with_the_newest_the_best_or_a_named_checkpoint(tmp_path: Path, key: str) -> None:
    run = an_earlier_run(tmp_path, steps=(), driver=this_process(), state="running")
    save_steps(run, [3, 5], best=BestSoFar(metric="val/loss", direction="minimize", step=3, value=0.5))
    word = f"{key}={run.path.parent.name}/{run.path.name}"
    for end, step in (("", 5), ("/checkpoints/best", 3), ("/checkpoints/step-00000003", 3)):
        found = source(tmp_path, word + end, "train.steps=9")
        assert (found.run_dir.path, found.step) == (run.path, step)
        assert found.train.steps == (step if key == "evaluate" else 9)
        assert read_manifest(found.checkpoint)["step"] == step
    an_earlier_run(tmp_path, steps=(), name="evaluation").update_record(evaluated="digits-ddp")
    for end, step in (("", 5), ("/checkpoints/best", 3)):
        warnings: list[str] = []
        found = source(tmp_path, f"{key}=last{end}", "train.steps=9", warnings=warnings)
        assert (found.run_dir.path, found.step, warnings) == (run.path, step, [f"{key}=last is {run.path}"])
    assert source(tmp_path) is None


@pytest.mark.slow
@pytest.mark.parametrize("end", ["", "/checkpoints/best"])
def test_a_run_that_trains_on_takes_away_no_checkpoint_that_another_one_begins_with(tmp_path: Path, end: str) -> None:
    run = an_earlier_run(tmp_path, steps=(), driver=this_process(), state="running")
    ended = threading.Event()

    def train() -> None:
        for step in itertools.count(1):
            save_steps(run, [step], best=BestSoFar(metric="val/loss", direction="minimize", step=step, value=0.5))
            begun.set()
            prune(run.checkpoints, 1, saved_step=step)
            if ended.is_set():
                return

    begun, training = threading.Event(), threading.Thread(target=train)
    training.start()
    try:
        assert begun.wait(60)
        for _ in range(5):
            warnings: list[str] = []
            found = source(tmp_path, f"evaluate={run.path}{end}", warnings=warnings)
            assert found.checkpoint is not None
            verify(found.checkpoint)
            assert warnings == []
    finally:
        ended.set()
        training.join(60)
    last = step_of(found.checkpoint.name.split(".")[1])
    prune(run.checkpoints, 1, saved_step=last + 1000)
    assert load(found.checkpoint).meta["step"] == last
    del found
    gc.collect()
    assert len(list(run.checkpoints.iterdir())) == 1, "nothing is left of what the readers held"


@dataclass(frozen=True, kw_only=True)
class Enrolling(Digits):
    """Its model leaves a file for each process that builds it."""

    folder: str

    def model(self) -> nn.Sequential:
        (Path(self.folder) / str(os.getpid())).touch()
        return super().model()


@pytest.mark.parametrize("key", ["resume", "evaluate"])
def test_a_model_is_compared_with_the_checkpoint_in_another_process(tmp_path: Path, key: str) -> None:
    run = an_earlier_run(tmp_path / "runs")
    config, job = config_of(tmp_path / "runs", f"{key}={run.path}"), Enrolling(hidden=4, folder=str(tmp_path))
    find = find_source if key == "evaluate" else find_resume
    assert find(config, job, warnings=[], redactor=Redactor()) is not None
    (built_in,) = (path.name for path in tmp_path.iterdir() if path.name.isdigit())
    assert built_in != str(os.getpid())


def test_what_cannot_be_evaluated_is_said_with_a_remedy(tmp_path: Path, golden: Golden) -> None:
    run = an_earlier_run(tmp_path, steps=(5,))
    best = f"evaluate={run.path}/checkpoints/best"
    with golden.raises(ConfigError, RUN=run.path):
        source(tmp_path, best)
    run.update_record(best={"metric": "val/loss", "step": 2, "value": 0.4})
    with golden.raises(ConfigError, RUN=run.path):
        source(tmp_path, best)
    save_steps(run, [6], best=BestSoFar(metric="val/loss", direction="minimize", step=3, value=0.5))
    with golden.raises(ConfigError, RUN=run.path):
        source(tmp_path, best)
    with pytest.raises(ConfigError, match=r"evaluate=nothing: no run directory there"):
        source(tmp_path, "evaluate=nothing")
    empty = an_earlier_run(tmp_path, steps=())
    with golden.raises(ConfigError, RUN=empty.path):
        source(tmp_path, f"evaluate={empty.path}")
    empty.config_file.write_text("evaluate: another\n")
    with golden.raises(ConfigError, RUN=empty.path):
        source(tmp_path, f"evaluate={empty.path}")


def test_a_run_that_continues_from_another_one_is_told_what_differs_and_what_to_type(
    tmp_path: Path, golden: Golden
) -> None:
    run = an_earlier_run(tmp_path, steps=(5,))
    run.update_record(params={"job.lr": 0.5})
    warnings: list[str] = []
    assert source(tmp_path, f"start_from={run.path}", "train.steps=6", warnings=warnings) is not None
    golden.says(warnings)
    run.update_record(params={"train.precision": "auto"}, precision="fp32")
    for precision, said in (("auto", []), ("bf16", ["train.precision was fp32 before; it is bf16 from now on"])):
        warnings = []
        source(tmp_path, f"start_from={run.path}", "train.steps=6", f"train.precision={precision}", warnings=warnings)
        assert warnings == said
    with golden.raises(ConfigError, RUN=run.path):
        source(tmp_path, f"start_from={run.path}", "train.steps=5")
    named = f"{run.path}/checkpoints/step-00000005"
    (error,) = refused(config_of(tmp_path, f"resume={named}"))
    golden.says(error, RUN=run.path)

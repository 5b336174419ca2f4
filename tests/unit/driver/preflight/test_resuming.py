"""Which run a command continues, and what it says of one that it does not continue."""

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

from helpers.conformance.cases import having
from helpers.files.golden import Golden
from helpers.records.earlier_runs import JOB, NOBODY, an_earlier_run, config_of, plan_of, refused, resume, save_steps
from jobs.digits import Digits
from orchestrator.config.build import ConfigError
from orchestrator.config.redact import MASK, Redactor
from orchestrator.driver.checked_runs import check_all
from orchestrator.driver.preflight.record import command_line, open_run
from orchestrator.driver.preflight.resume import find_resume, find_source
from orchestrator.driver.process.origin import LEFT_RUN, left_run
from orchestrator.job import Job, Split
from orchestrator.records.lock import this_process
from orchestrator.records.run_dir import RunDir
from orchestrator.state.best import BestSoFar
from orchestrator.state.checkpoint import save
from orchestrator.state.train_state import capture
from orchestrator.strategies.data.datasets import SAMPLES
from orchestrator.strategies.external.job import Script
from orchestrator.strategies.update.job_optimizer import schedule_of


def test_a_new_run_unless_asked(tmp_path: Path) -> None:
    an_earlier_run(tmp_path)
    assert resume(config_of(tmp_path)) == (None, [])


def test_auto_takes_the_newest_unfinished_run_of_this_name(tmp_path: Path) -> None:
    an_earlier_run(tmp_path, steps=[1])
    wanted = an_earlier_run(tmp_path, steps=[2, 5], state="killed")
    an_earlier_run(tmp_path, state="finished")
    an_earlier_run(tmp_path, name="other")
    found, warnings = resume(config_of(tmp_path, "resume=auto"))
    assert (found.run_dir.path, found.step, found.checkpoint.name) == (wanted.path, 5, "step-00000005")
    assert warnings == []


def test_last_is_the_newest_run_that_has_trained(tmp_path: Path, golden: Golden) -> None:
    other = an_earlier_run(tmp_path, steps=[2], name="another")
    wanted = an_earlier_run(tmp_path, steps=[5])
    an_earlier_run(tmp_path, steps=[], name="digits-ddp-evaluation").update_record(evaluated="digits-ddp")
    damaged = an_earlier_run(tmp_path)
    damaged.record_file.write_text("{")
    for words, run, step in (([], wanted, 5), (["name=another"], other, 2)):
        found, warnings = resume(config_of(tmp_path, "resume=last", *words))
        assert (found.run_dir.path, found.step) == (run.path, step)
        assert warnings[-1] == f"resume=last is {run.path}"
    golden.says(refused(config_of(tmp_path, "resume=last", "name=third")))


def test_what_is_wrong_with_the_last_run_names_it(tmp_path: Path, golden: Golden) -> None:
    golden.says(refused(config_of(tmp_path, "resume=last")))
    an_earlier_run(tmp_path)
    run = an_earlier_run(tmp_path, steps=[])
    golden.says(refused(config_of(tmp_path, "resume=last")), RUN=run.path)


@pytest.mark.needs("scripts")
def test_a_script_continues_in_its_run_directory_whatever_it_has_saved(tmp_path: Path) -> None:
    an_earlier_run(tmp_path, steps=[], state="finished", name="train")
    wanted = an_earlier_run(tmp_path, steps=[], state="killed", name="train")
    wanted.metrics_file.write_text('{"step": 12, "time": 1.0, "train/loss": 0.5}\n')
    words = ["strategy=script", "job.script=train.py"]
    for asked in ("auto", str(wanted.path)):
        found, warnings = resume(config_of(tmp_path, *words, f"resume={asked}"), job=Script(script="train.py"))
        assert (found.run_dir.path, found.step, found.checkpoint, warnings) == (wanted.path, 12, None, [])


def test_auto_starts_anew_where_there_is_nothing_to_resume(tmp_path: Path) -> None:
    config = config_of(tmp_path, "resume=auto")
    nothing = "resume=auto: no unfinished run is named digits-ddp; this is a new one"
    assert resume(config) == (None, [nothing])
    an_earlier_run(tmp_path, state="finished")
    assert resume(config) == (None, [nothing])
    run = an_earlier_run(tmp_path, steps=[])
    assert resume(config) == (None, [f"resume=auto: {run.path} has no checkpoint yet; this is a new run"])


def test_auto_prefers_an_older_run_with_a_checkpoint_to_a_stray_start(tmp_path: Path, golden: Golden) -> None:
    wanted = an_earlier_run(tmp_path, steps=[2000], state="killed")
    stray = an_earlier_run(tmp_path, steps=[], state="killed")
    found, warnings = resume(config_of(tmp_path, "resume=auto", "train.steps=5000"))
    assert (found.run_dir, found.step) == (wanted, 2000)
    golden.says(warnings, STRAY=stray.path)


def test_a_restarted_driver_continues_its_own_run_or_starts_afresh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever other runs of this name there are: older, newer, or in another directory than the present one."""
    an_earlier_run(tmp_path, steps=[7], state="killed")
    own = an_earlier_run(tmp_path, steps=[], state="running")
    an_earlier_run(tmp_path, steps=[9], state="killed")
    monkeypatch.setenv(LEFT_RUN, f"{os.getpid()}:{own.location}")
    assert left_run() is None, "set by the driver's own process, for one that it starts"
    monkeypatch.setenv(LEFT_RUN, f"{os.getppid()}:{own.location}")
    for words in ([], ["resume=never"], ["resume=auto"]):
        restarted = f"{own.path} has no checkpoint yet; this is a new run"
        assert resume(config_of(tmp_path, *words)) == (None, [restarted])
    save_steps(own, [3])
    for words in ([], ["resume=never"], ["resume=auto"]):
        found, warnings = resume(config_of(tmp_path, *words))
        assert (found.run_dir, found.step, warnings) == (own, 3, [])


RACE = """
import os, sys, time
from pathlib import Path
from helpers.records.earlier_runs import JOB, config_of, plan_of, resume
from orchestrator.config.build import ConfigError
from orchestrator.config.redact import Redactor
from orchestrator.driver.preflight.record import open_run

me, tries = sys.argv[1], sys.argv[2:]
for folder in map(Path, tries):
    config = config_of(folder, "resume=auto")
    found, _ = resume(config)
    plan = plan_of(config)
    (folder / f"ready-{me}").touch()
    while len(list(folder.glob("ready-*"))) < 2:
        time.sleep(0.0005)
    try:
        run, _ = open_run(config, JOB, plan, found, command="", sweep=None, redactor=Redactor())
        print("got", run.path, flush=True)
    except ConfigError as e:
        print(*e.errors, flush=True)
for folder in map(Path, tries):
    (folder / f"ended-{me}").touch()
    while len(list(folder.glob("ended-*"))) < 2:  # a driver that has ended keeps nobody from a run
        time.sleep(0.001)
"""


@pytest.mark.campaign
def test_of_two_that_resume_at_once_one_gets_the_run(tmp_path: Path) -> None:
    """Five races are for a run to continue, and five for the first run of a name."""
    folders = [tmp_path / f"{number}" for number in range(10)]
    for folder in folders:
        folder.mkdir()
    for folder in folders[:5]:
        an_earlier_run(folder, state="running", driver=NOBODY)
    path = os.pathsep.join(filter(None, sys.path))
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACE, name, *map(str, folders)],
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in "ab"
    ]
    outputs = [racer.communicate(timeout=200)[0].splitlines() for racer in racers]
    for folder, answers in zip(folders, zip(*outputs, strict=True), strict=True):
        refused, got = sorted(answers, key=lambda text: text.startswith("got"))
        assert got.startswith("got"), answers
        assert re.match(rf"resume=auto: {folder}/.* is still running \(pid \d+ on ", refused), answers
        assert len(list(folder.glob("*/*"))) == 1, "the other one leaves no trace"


def test_a_run_that_another_process_has_continued_meanwhile_is_not_continued_from_an_old_checkpoint(
    tmp_path: Path,
) -> None:
    earlier = an_earlier_run(tmp_path)
    config = config_of(tmp_path, "resume=auto")
    found, _ = resume(config)
    earlier.update_record(driver={**NOBODY, "pid": 1})
    before = earlier.read_record()
    with pytest.raises(ConfigError, match="another process has continued"):
        open_run(config, JOB, plan_of(config), found, command="", sweep=None, redactor=Redactor())
    assert earlier.read_record() == before


def test_what_changes_the_curve_of_a_resumed_run_is_said(tmp_path: Path, golden: Golden) -> None:
    run = an_earlier_run(tmp_path)
    began = {"train.global_batch_size": 64, "train.steps": 5, "seed": 0, "job.lr": 0.5, "job.hidden": 4}
    run.update_record(params=began)
    found, warnings = resume(config_of(tmp_path, "resume=auto", "train.global_batch_size=65", "train.log_every=7"))
    assert found is not None
    golden.says(warnings)


class Scheduled(Digits):
    def scheduler(self, optimizer: Optimizer, steps: int) -> LRScheduler:
        return CosineAnnealingLR(optimizer, steps)


def test_a_schedule_of_another_length_is_said(tmp_path: Path, golden: Golden) -> None:
    an_earlier_run(tmp_path).update_record(params={"train.steps": 500})
    config = config_of(tmp_path, "resume=auto", "train.steps=600")
    golden.says(resume(config, Scheduled(hidden=4))[1])
    assert resume(config)[1] == []


@dataclass(frozen=True, kw_only=True)
class Annealed(Digits):
    """Has so many training samples, and a schedule that ends at ``floor``."""

    samples: int = 7
    floor: float = 0.0
    adam: bool = False

    def dataset(self, split: Split) -> Any:
        if self.samples < 0:
            raise OSError("only the workers have it")
        return [(torch.zeros(64), 0)] * self.samples

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return torch.optim.AdamW(parameters, lr=0.1) if self.adam else super().optimizer(parameters)

    def scheduler(self, optimizer: Optimizer, steps: int) -> LRScheduler:
        return CosineAnnealingLR(optimizer, steps, eta_min=self.floor)


def an_annealed_run(output_dir: Path, job: Annealed) -> RunDir:
    """It has made three of six steps."""
    run = an_earlier_run(output_dir, steps=[])
    model = job.model()
    optimizer = job.optimizer(model.parameters())
    schedule = schedule_of(job, [optimizer], having(steps=6), steps_per_epoch=None)
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        schedule.step()
    state = capture(model, optimizer, schedule, step=3, samples_consumed=3, **{SAMPLES: job.samples})
    save(run.checkpoints, state, run_uid="first")
    return run


@pytest.mark.slow
@pytest.mark.parametrize("adam", [False, True])
@pytest.mark.parametrize("key", ["resume", "start_from"])
def test_a_schedule_that_cannot_go_on_is_refused_before_anything_starts(
    tmp_path: Path, adam: bool, key: str, golden: Golden
) -> None:
    job = Annealed(hidden=4, adam=adam)
    run = an_annealed_run(tmp_path, job)

    def errors(job: Job, steps: int) -> list[str]:
        config, given = config_of(tmp_path, f"{key}='{run.path}'", f"train.steps={steps}"), Redactor()
        try:
            (find_resume if key == "resume" else find_source)(config, job, warnings=[], redactor=given)
        except ConfigError as e:
            return list(e.errors)
        return []

    assert errors(job, 6) == errors(job, 9) == []
    assert errors(replace(job, floor=0.01), 6) == []
    (error,) = errors(replace(job, floor=0.01), 9)
    golden.says(error, RUN=run.path)


def test_data_of_another_size_are_refused_before_anything_starts(tmp_path: Path, golden: Golden) -> None:
    job = Annealed(hidden=4)
    run = an_annealed_run(tmp_path, job)
    config = config_of(tmp_path, f"resume='{run.path}'", "train.steps=6")
    (error,) = refused(config, replace(job, samples=9))
    golden.says(error, RUN=run.path)
    for other in (job, replace(job, samples=-1)):
        assert resume(config, other)[0] is not None
    another = config_of(tmp_path, f"start_from='{run.path}'", "train.steps=6")
    assert find_source(another, replace(job, samples=9), warnings=[], redactor=Redactor()) is not None


@pytest.mark.parametrize(
    ("record", "word", "expected", "said"),
    [
        ({"precision": "bf16"}, "auto", "bf16", ["train.precision=auto: the run continues in bf16, as before"]),
        ({"precision": "fp32", "params": {"train.precision": "auto"}}, "auto", "fp32", []),
        ({"params": {"train.precision": "fp32"}}, "auto", "fp32", []),
        ({"params": {"train.precision": "auto"}}, "auto", "auto", []),
        (
            {"precision": "bf16", "params": {"train.precision": "auto"}},
            "fp16",
            "fp16",
            ["train.precision was bf16 before; it is fp16 from now on"],
        ),
    ],
    ids=["bf16", "fp32", "given before", "never chosen", "given now"],
)
def test_a_resumed_run_keeps_its_precision(
    tmp_path: Path, record: dict[str, Any], word: str, expected: str, said: list[str]
) -> None:
    an_earlier_run(tmp_path).update_record(**record)
    found, warnings = resume(config_of(tmp_path, "resume=auto", f"train.precision={word}"))
    assert (found.train.precision, warnings) == (expected, said)


def test_the_command_of_a_run_can_be_typed_again() -> None:
    overrides = ["strategy=ddp", "resume=auto", "tracking.uri=http://me:hunter2@h", "job.path=a b", "resume=/r"]
    assert command_line(overrides, Redactor()) == (
        f"python -m orchestrator.launch strategy=ddp 'tracking.uri=http://{MASK}@h' 'job.path=a b' resume=/r"
    )
    assert command_line(["strategy=ddp"], Redactor()) == "python -m orchestrator.launch strategy=ddp"
    twice = ["resume=/runs/a", "strategy=ddp", "resume=/runs/a"]
    assert command_line(twice, Redactor()) == "python -m orchestrator.launch strategy=ddp resume=/runs/a"


def test_a_run_whose_driver_was_killed_can_be_resumed(tmp_path: Path) -> None:
    wanted = an_earlier_run(tmp_path, state="running", driver=NOBODY)
    found, _ = resume(config_of(tmp_path, "resume=auto"))
    assert found.run_dir == wanted


@pytest.mark.parametrize("how", ["auto", "{run}"])
def test_a_run_that_is_still_alive_is_left_alone(how: str, tmp_path: Path) -> None:
    run = an_earlier_run(tmp_path, state="running", driver=this_process())
    (error,) = refused(config_of(tmp_path, f"resume='{how.format(run=run.path)}'"))
    assert f"{run.path} is still running (pid {os.getpid()} on " in error


@pytest.mark.slow
def test_a_run_is_named_by_its_path_or_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = an_earlier_run(tmp_path / "outputs")
    monkeypatch.chdir(tmp_path)
    below = run.path.relative_to(tmp_path / "outputs")
    for text in (str(run.path), f"outputs/{below}", str(below), run.path.name, run.read_record()["name"]):
        found, _ = resume(config_of(tmp_path / "outputs", f"resume={text}"))
        assert found.run_dir == run


def test_no_such_run_lists_those_that_are(tmp_path: Path) -> None:
    run = an_earlier_run(tmp_path)
    (error,) = refused(config_of(tmp_path, "resume=yesterday"))
    assert error.startswith("resume=yesterday: no run directory there; ")
    assert run.path.name in error
    assert f"looked for {Path.cwd() / 'yesterday' / 'run.json'} or {tmp_path / 'yesterday' / 'run.json'}" in error


def test_no_run_at_all_says_where_they_would_be(tmp_path: Path) -> None:
    (error,) = refused(config_of(tmp_path / "outputs", "resume=outputs/nothing"))
    assert f"there are no runs below {tmp_path / 'outputs'} (output_dir)" in error
    assert str(Path.cwd() / "outputs" / "nothing" / "run.json") in error


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(tmp_path: Path) -> None:
    run = an_earlier_run(tmp_path, steps=[1, 2])
    file = run.checkpoints / "step-00000002" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    found, warnings = resume(config_of(tmp_path, "resume=auto"))
    assert found.step == 1
    (warning,) = warnings
    assert "step-00000002" in warning


def test_when_every_checkpoint_is_damaged_nothing_is_silently_begun_again(tmp_path: Path) -> None:
    run = an_earlier_run(tmp_path)
    (run.checkpoints / "step-00000003" / "manifest.json").write_text("{")
    (error,) = refused(config_of(tmp_path, "resume=auto"))
    assert "step-00000003" in error
    assert "resume=never" in error


def test_a_damaged_record_is_skipped_by_auto_and_refused_by_name(tmp_path: Path) -> None:
    wanted = an_earlier_run(tmp_path)
    broken = an_earlier_run(tmp_path)
    broken.record_file.write_text("{")
    found, warnings = resume(config_of(tmp_path, "resume=auto"))
    assert found.run_dir == wanted
    assert str(broken.record_file) in warnings[0]
    (error,) = refused(config_of(tmp_path, f"resume={broken.path}"))
    assert f"{broken.record_file} is damaged" in error


def test_a_run_that_is_done_needs_more_steps(tmp_path: Path) -> None:
    run = an_earlier_run(tmp_path, steps=[20], state="finished")
    (error,) = refused(config_of(tmp_path, f"resume={run.path}", "train.steps=20"))
    assert error.startswith("train.steps=20: ")
    assert "raise it" in error
    found, _ = resume(config_of(tmp_path, f"resume={run.path}", "train.steps=21"))
    assert found is not None


def test_a_run_that_ended_after_its_last_step_lacks_only_its_end(tmp_path: Path) -> None:
    an_earlier_run(tmp_path, steps=[20])
    found, _ = resume(config_of(tmp_path, "resume=auto", "train.steps=20"))
    assert found is not None
    (error,) = refused(config_of(tmp_path, "resume=auto", "train.steps=19"))
    assert error.startswith("train.steps=19: ")


class Adam(Digits):
    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=self.lr)


@dataclass(frozen=True, kw_only=True)
class NeedsMemory(Digits):
    """Reads the memory of a tensor while it builds its model."""

    sums: list[float] = field(default_factory=list)

    def model(self) -> nn.Module:
        self.sums += torch.ones(3).numpy().tolist()
        return super().model()


def test_another_model_names_the_parameters(tmp_path: Path) -> None:
    an_earlier_run(tmp_path)
    text = "\n".join(refused(config_of(tmp_path, "resume=auto"), Digits(hidden=5, depth=1)))
    for name in ("hidden0.weight", "hidden1.weight"):
        assert name in text
    assert text.startswith("resume=auto: of another model: ")


def test_the_fields_by_which_a_model_differs_are_one_error_with_the_command(tmp_path: Path, golden: Golden) -> None:
    run = an_earlier_run(tmp_path)
    run.config_file.write_text("job:\n  _target_: jobs.digits.Digits\n  hidden: 4\n")
    run.update_record(params={"job.hidden": 4, "job.lr": 0.5, "seed": 3})
    job = Digits(hidden=5)
    for command, key, words in (
        (
            "orchestrator job=digits job.hidden=4 train.steps=9 resume=auto",
            "resume",
            ["train.steps=20"],
        ),
        ("python -m orchestrator.launch job=digits job.hidden=4 job.lr=0.5", "resume", ["job=digits", "job.hidden=5"]),
        ("python -m orchestrator.launch job=digits", "resume", ["job=digits", "seed=3"]),
        ("orchestrator.run(Digits(hidden=4))", "resume", []),
        ("python -m orchestrator.launch job=digits job.hidden=4", "start_from", []),
    ):
        run.update_record(command=command)
        find = find_resume if key == "resume" else find_source
        with golden.raises(ConfigError, RUN=run.path):
            find(config_of(tmp_path, f"{key}={run.path}"), job, warnings=[], redactor=Redactor(), words=words)


def test_auto_without_a_job_begins_nothing_beside_the_unfinished_run_of_another_job(
    tmp_path: Path, golden: Golden
) -> None:
    def auto(*words: str) -> list[str]:
        config = config_of(tmp_path, "resume=auto", *words)
        typed = ["strategy=ddp", "resume=auto", *words]
        warnings: list[str] = []
        assert find_resume(config, JOB, warnings=warnings, redactor=Redactor(), words=typed) is None
        return warnings

    other = an_earlier_run(tmp_path, name="blobs-ddp", state="killed")
    other.config_file.write_text("job:\n  _target_: blobs.Blobs\n  width: 40\n")
    other.update_record(command="python -m orchestrator.launch strategy=ddp job=blobs.Blobs job.width=40")
    with golden.raises(ConfigError, RUN=other.path):
        auto("train.steps=20")
    new = ["resume=auto: no unfinished run is named digits-ddp; this is a new one"]
    assert auto("job=digits") == auto("experiment=quick") == new
    assert auto("name=mine") == [new[0].replace("digits-ddp", "mine")]
    other.update_record(driver=this_process(), state="running")
    assert auto() == new, "what is running is not to be resumed"
    other.update_record(driver=NOBODY, state="finished")
    assert auto() == new
    an_earlier_run(tmp_path, name="z-digits").config_file.write_text("job:\n  _target_: jobs.digits.Digits\n")
    other.update_record(state="killed")
    assert auto() == new, "the newest unfinished run is of the same job"
    own = an_earlier_run(tmp_path, steps=())
    an_earlier_run(tmp_path, name="more-blobs").config_file.write_text(other.config_file.read_text())
    assert auto() == [f"resume=auto: {own.path} has no checkpoint yet; this is a new run"]


def test_a_run_that_is_resumed_keeps_its_name(tmp_path: Path, golden: Golden) -> None:
    run = an_earlier_run(tmp_path, name="blobby")
    golden.says(refused(config_of(tmp_path, f"resume={run.path}", "name=other")), RUN=run.path)
    words = [f"output_dir={tmp_path}", "strategy=ddp", "job=digits", "job.hidden=4", "resume=blobby"]
    for more in ([], ["name=blobby"], ["debug=true"], ["debug=true", "strategy=pipeline"]):
        (checked,) = check_all([[*words, *more]], Redactor())
        assert checked.config.run_name == "blobby"


@pytest.mark.parametrize(
    ("best", "said"),
    [
        ("checkpoint.best=val/F1 checkpoint.best_direction=maximize", False),
        ("checkpoint.keep=1", True),
        ("checkpoint.best=val/F1 checkpoint.best_direction=minimize", True),
        ("checkpoint.best=val/loss", True),
    ],
)
def test_a_best_checkpoint_that_is_no_longer_updated_is_said(
    tmp_path: Path, best: str, said: bool, golden: Golden
) -> None:
    run = an_earlier_run(tmp_path, steps=())
    save_steps(run, [2], best=BestSoFar(metric="val/F1", direction="maximize", step=2, value=0.9))
    save_steps(run, [3])
    _, warnings = resume(config_of(tmp_path, f"resume={run.path}", *best.split()))
    golden.says(warnings) if said else None
    assert bool(warnings) == said


def test_another_optimizer_is_named(tmp_path: Path) -> None:
    an_earlier_run(tmp_path)
    (error,) = refused(config_of(tmp_path, "resume=auto"), Adam(hidden=4))
    assert "SGD" in error
    assert "Adam" in error


def test_a_model_that_needs_memory_while_it_is_built_is_left_to_the_workers(tmp_path: Path) -> None:
    an_earlier_run(tmp_path)
    job = NeedsMemory(hidden=5)
    found, _ = resume(config_of(tmp_path, "resume=auto"), job)
    assert found is not None
    assert job.sums == [], "the driver does not build it with memory"

"""What is settled before Ray starts: places, the run to resume, the records of a run."""

from __future__ import annotations

import dataclasses
import enum
import json
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
import yaml
from torch import nn

from jobs.digits import Digits
from orchestrator.config.build import ConfigError
from orchestrator.config.compose import compose
from orchestrator.config.redact import MASK, Redactor
from orchestrator.config.schema import Config, JobSpec
from orchestrator.driver.preflight.paths import absolute_paths, environment_errors
from orchestrator.driver.preflight.record import command_line, open_run
from orchestrator.driver.preflight.resume import Resume, find_resume, find_source
from orchestrator.driver.process.reports import LEFT_RUN, left_run
from orchestrator.job import Job
from orchestrator.planning.plan import Node, Plan, make_plan
from orchestrator.records import run_dir as rundir
from orchestrator.records.process import is_alive, this_process
from orchestrator.records.run_dir import RunDir
from orchestrator.state.best import BEST, BestSoFar
from orchestrator.state.checkpoint import save
from orchestrator.state.train_state import capture
from orchestrator.strategies import registry

JOB = Digits(hidden=4)
NODES = (Node(node_id="n", name="n", cpus=2, gpus=0),)
NOBODY = {**this_process(), "start_ticks": 0}
"""A driver that is dead: another process has its number."""


def config_of(output_dir: Path, *words: str) -> Config:
    errors: list[str] = []
    config, _ = compose([f"output_dir='{output_dir}'", *words], errors, registry.config_class)
    assert config is not None, errors
    return absolute_paths(config)


def plan_of(config: Config) -> Plan:
    return make_plan(config, registry.load(config.strategy.name), NODES, oversubscribe_cpus=True)


def an_earlier_run(
    output_dir: Path,
    *,
    job: Job = JOB,
    steps: Iterable[int] = (3,),
    state: str = "failed",
    name: str = "digits-ddp",
    driver: dict[str, Any] = NOBODY,
) -> RunDir:
    run = rundir.create(output_dir, name)
    run.update_record(name=name, uid="first", state=state, driver=driver)
    save_steps(run, steps, job)
    return run


def save_steps(run: RunDir, steps: Iterable[int], job: Job = JOB, best: BestSoFar | None = None) -> None:
    model = job.model()
    optimizer = job.optimizer(model.parameters())
    for step in steps:
        state = capture(model, optimizer, None, step=step, samples_consumed=step)
        state.meta.update({} if best is None else {BEST: best.to_json()})
        save(run.checkpoints, state, run_uid="first")


def resume(config: Config, job: Job = JOB) -> tuple[Resume | None, list[str]]:
    warnings: list[str] = []
    return find_resume(config, job, warnings=warnings, redactor=Redactor()), warnings


def refused(config: Config, job: Job = JOB) -> list[str]:
    with pytest.raises(ConfigError) as error:
        resume(config, job)
    return list(error.value.errors)


# Places -------------------------------------------------------------------------------------------


def test_paths_are_made_absolute_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = config_of(Path("runs"))
    assert config.output_dir == str(tmp_path / "runs")
    assert config.tracking.uri == f"sqlite:///{tmp_path / 'mlflow.db'}"
    assert config_of(Path("/a/b")).output_dir == "/a/b"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert config_of(Path("~/runs")).output_dir == str(tmp_path / "home" / "runs")


def test_nothing_is_kept_in_the_directory_that_ray_unpacks_for_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    throw_away = tmp_path / "runtime_resources" / "working_dir_files" / "_ray_pkg_abc"
    throw_away.mkdir(parents=True)
    monkeypatch.chdir(throw_away)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    config = config_of(Path("outputs"))
    assert config.output_dir == str(tmp_path / "home" / "orchestrator" / "outputs")
    assert config.tracking.uri == f"sqlite:///{tmp_path}/home/orchestrator/mlflow.db"


def test_looking_at_a_place_leaves_nothing_there(tmp_path: Path) -> None:
    config = config_of(tmp_path / "a" / "b")
    assert environment_errors(config) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", ["{tmp}/file", "{tmp}/file/below/it", "/proc/nowhere/at/all"])
def test_a_place_that_cannot_be_written_is_a_error(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = place.format(tmp=tmp_path)
    (error,) = environment_errors(config_of(Path(path)))
    assert error.startswith(f"output_dir={path}: cannot be written (")


def test_a_read_only_place_is_a_error(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    tmp_path.chmod(0o500)
    (error,) = environment_errors(config_of(tmp_path / "a"))
    assert "Permission denied" in error


def test_all_errors_of_the_surroundings_come_at_once(tmp_path: Path) -> None:
    config = config_of(Path("/proc/nowhere"), "tracking.uri=htp://me:hunter2@host")
    errors = environment_errors(config)
    assert [f.partition("=")[0] for f in errors] == ["tracking.uri", "output_dir"]
    assert "hunter2" not in "".join(errors)


# Resuming -----------------------------------------------------------------------------------------


def test_a_new_run_unless_asked(tmp_path: Path) -> None:
    an_earlier_run(tmp_path)
    assert resume(config_of(tmp_path)) == (None, [])


def test_auto_takes_the_newest_unfinished_run_of_this_name(tmp_path: Path) -> None:
    an_earlier_run(tmp_path, steps=[1])
    wanted = an_earlier_run(tmp_path, steps=[2, 5], state="killed")
    an_earlier_run(tmp_path, state="finished")
    an_earlier_run(tmp_path, name="other")
    found, warnings = resume(config_of(tmp_path, "resume=auto"))
    assert found is not None
    assert (found.run_dir.path, found.step, found.checkpoint.name) == (wanted.path, 5, "step-00000005")
    assert warnings == []


def test_auto_starts_anew_where_there_is_nothing_to_resume(tmp_path: Path) -> None:
    config = config_of(tmp_path, "resume=auto")
    nothing = "resume=auto: no unfinished run is named digits-ddp; this is a new one"
    assert resume(config) == (None, [nothing])
    an_earlier_run(tmp_path, state="finished")
    assert resume(config) == (None, [nothing])
    run = an_earlier_run(tmp_path, steps=[])
    assert resume(config) == (None, [f"resume=auto: {run.path} has no checkpoint yet; this is a new run"])


def test_auto_prefers_an_older_run_with_a_checkpoint_to_a_stray_start(tmp_path: Path) -> None:
    wanted = an_earlier_run(tmp_path, steps=[2000], state="killed")
    stray = an_earlier_run(tmp_path, steps=[], state="killed")
    found, warnings = resume(config_of(tmp_path, "resume=auto", "train.steps=5000"))
    assert found is not None
    assert (found.run_dir, found.step) == (wanted, 2000)
    assert warnings == [f"resume=auto: {stray.path} has no checkpoint; an older run is continued"]


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
        assert found is not None
        assert (found.run_dir, found.step, warnings) == (own, 3, [])


RACE = """
import os, sys, time
from pathlib import Path
from test_prepare import JOB, Redactor, config_of, open_run, plan_of, resume
from orchestrator.config.build import ConfigError

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


@pytest.mark.slow
def test_of_two_that_resume_at_once_one_gets_the_run(tmp_path: Path) -> None:
    """Ten races: for a run to continue, and for the first run of a name."""
    folders = [tmp_path / f"{number}" for number in range(10)]
    for folder in folders:
        folder.mkdir()
    for folder in folders[:5]:
        an_earlier_run(folder, state="running", driver=NOBODY)
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACE, name, *map(str, folders)],
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in "ab"
    ]
    outputs = [racer.communicate(timeout=60)[0].splitlines() for racer in racers]
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


def test_what_changes_the_curve_of_a_resumed_run_is_said(tmp_path: Path) -> None:
    run = an_earlier_run(tmp_path)
    began = {"train.global_batch_size": 64, "train.steps": 5, "seed": 0, "job.lr": 0.5, "job.hidden": 4}
    run.update_record(params=began)
    found, warnings = resume(config_of(tmp_path, "resume=auto", "train.global_batch_size=65", "train.log_every=7"))
    assert found is not None
    assert warnings == [
        "train.global_batch_size was 64 before; it is 65 from now on",
        f"job.lr was 0.5 before; it is {JOB.lr} from now on",
        "the optimizer keeps its settings from the checkpoint, including the learning rate",
    ]


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
    assert found is not None
    assert (found.train.precision, warnings) == (expected, said)


def test_a_kept_precision_that_does_not_fit_is_an_error(tmp_path: Path) -> None:
    an_earlier_run(tmp_path).update_record(precision="bf16-true")
    (error,) = refused(config_of(tmp_path, "resume=auto", "train.ema_decay=0.9"))
    assert error.startswith("resume=auto: train.ema_decay=0.9: ")


def test_the_command_of_a_run_can_be_typed_again() -> None:
    overrides = ["strategy=ddp", "resume=auto", "tracking.uri=http://me:hunter2@h", "job.path=a b", "resume=/r"]
    assert command_line(overrides, Redactor()) == (
        f"python -m orchestrator.launch strategy=ddp 'tracking.uri=http://{MASK}@h' 'job.path=a b' resume=/r"
    )
    assert command_line(["strategy=ddp"], Redactor()) == "python -m orchestrator.launch strategy=ddp"


def test_a_run_whose_driver_was_killed_can_be_resumed(tmp_path: Path) -> None:
    wanted = an_earlier_run(tmp_path, state="running", driver=NOBODY)
    found, _ = resume(config_of(tmp_path, "resume=auto"))
    assert found is not None
    assert found.run_dir == wanted


@pytest.mark.parametrize("how", ["auto", "{run}"])
def test_a_run_that_is_still_alive_is_left_alone(how: str, tmp_path: Path) -> None:
    run = an_earlier_run(tmp_path, state="running", driver=this_process())
    (error,) = refused(config_of(tmp_path, f"resume='{how.format(run=run.path)}'"))
    assert f"{run.path} is still running (pid {os.getpid()} on " in error


def test_a_run_is_named_by_its_path_or_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = an_earlier_run(tmp_path / "outputs")
    monkeypatch.chdir(tmp_path)
    below = run.path.relative_to(tmp_path / "outputs")
    for text in (str(run.path), f"outputs/{below}", str(below), run.path.name):
        found, _ = resume(config_of(tmp_path / "outputs", f"resume={text}"))
        assert found is not None
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
    assert found is not None
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
    assert found is not None
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


@dataclass(frozen=True, kw_only=True)
class Adam(Digits):
    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=self.lr)


@dataclass(frozen=True, kw_only=True)
class Computing(Digits):
    """Computes with real numbers while it builds its model."""

    sums: list[float] = field(default_factory=list)

    def model(self) -> nn.Module:
        self.sums.append(torch.linspace(0, 1, 3).sum().item())
        return super().model()


def test_another_model_names_the_parameters(tmp_path: Path) -> None:
    an_earlier_run(tmp_path)
    text = "\n".join(refused(config_of(tmp_path, "resume=auto"), Digits(hidden=5, depth=1)))
    for name in ("hidden0.weight", "hidden1.weight"):
        assert name in text
    assert text.startswith("resume=auto: of another model: ")


def test_another_optimizer_is_named(tmp_path: Path) -> None:
    an_earlier_run(tmp_path)
    (error,) = refused(config_of(tmp_path, "resume=auto"), Adam(hidden=4))
    assert "SGD" in error
    assert "Adam" in error


def test_a_model_that_computes_while_it_is_built_is_left_to_the_workers(tmp_path: Path) -> None:
    an_earlier_run(tmp_path)
    job = Computing(hidden=5)
    found, _ = resume(config_of(tmp_path, "resume=auto"), job)
    assert found is not None
    assert job.sums == [], "the driver does not build it with memory"


# Records ------------------------------------------------------------------------------------------


class Colour(enum.Enum):
    RED = 1


@dataclass(frozen=True, kw_only=True)
class Odd(Digits):
    """A job with fields of every kind, a secret among them."""

    api_key: str = "hunter2"
    tokenizer: str = "bytes"
    colour: Colour = Colour.RED
    where: Path = Path("/data/x")
    activation: type[nn.Module] = nn.ReLU
    sizes: tuple[int, ...] = (1, 2)


def test_the_records_of_a_new_run(tmp_path: Path) -> None:
    words = ["job.hidden=4", "tracking.uri=http://me:hunter2@host:5000", "train.clip_norm=1"]
    config = config_of(tmp_path / "outputs", *words)
    run, uid = open_run(
        config,
        JOB,
        plan_of(config),
        None,
        command="orchestrator",
        sweep={"id": "s", "name": "sweep"},
        redactor=Redactor(),
    )
    record = run.read_record()
    assert (record["state"], record["uid"], record["name"]) == ("waiting", uid, "digits-ddp")
    assert is_alive(record["driver"])
    assert record["plan"]["world_size"] == 2
    assert record["sweep"] == {"id": "s", "name": "sweep"}
    assert record["tags"].items() >= {"strategy": "ddp", "world_size": "2", "backend": "gloo"}.items()
    assert record["tracking"]["uri"] == f"http://{MASK}@host:5000"
    params = record["params"]
    assert params["job.hidden"] == 4
    assert params["job.momentum"] == 0.9
    assert params["train.clip_norm"] == 1.0
    assert not any(str(tmp_path) in str(v) for v in params.values())
    assert not {"output_dir", "tracking.uri", "resume"} & params.keys()
    stored = yaml.safe_load(run.config_file.read_text())
    assert stored["job"] == {"_target_": "jobs.digits.Digits", **dataclasses.asdict(JOB)}
    assert stored["strategy"]["name"] == "ddp"


def test_no_secret_is_written_and_every_field_can_be(tmp_path: Path) -> None:
    config = config_of(tmp_path, "tracking.uri=postgresql://me:hunter2@h/db?password=hunter2")
    config = replace(config, job=JobSpec(target=f"{__name__}.Odd", fields={}))
    run, _ = open_run(config, Odd(), plan_of(config), None, command="", sweep=None, redactor=Redactor())
    written = run.config_file.read_text() + run.record_file.read_text()
    assert "hunter2" not in written
    stored = yaml.safe_load(run.config_file.read_text())["job"]
    assert stored["api_key"] == MASK
    assert (stored["tokenizer"], stored["colour"], stored["sizes"]) == ("bytes", "RED", [1, 2])
    assert "ReLU" in stored["activation"]
    params = json.loads(run.record_file.read_text())["params"]
    assert params["job.api_key"] == MASK
    assert "job.where" not in params


def test_a_resumed_run_keeps_its_directory_and_identity(tmp_path: Path) -> None:
    earlier = an_earlier_run(tmp_path, state="killed")
    config = config_of(tmp_path, "resume=auto")
    found, _ = resume(config)
    run, uid = open_run(config, JOB, plan_of(config), found, command="", sweep=None, redactor=Redactor())
    assert (run, uid) == (earlier, "first")
    assert run.read_record()["state"] == "waiting"


def test_two_runs_are_told_apart(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    (one, uid), (other, other_uid) = (
        open_run(config, JOB, plan_of(config), None, command="", sweep=None, redactor=Redactor()) for _ in range(2)
    )
    assert one != other
    assert uid != other_uid


def test_a_place_that_breaks_after_the_check_is_a_error_too(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    config = config_of(tmp_path / "file")
    with pytest.raises(ConfigError, match=r"output_dir=.*: cannot be written"):
        open_run(config, JOB, plan_of(config), None, command="", sweep=None, redactor=Redactor())


def test_a_run_that_has_ended_early_is_trained_further_with_more_patience(tmp_path: Path) -> None:
    best = BestSoFar(metric="val/loss", direction="minimize", step=3, value=0.5, bar=0.5, evaluations_since=2)
    run = an_earlier_run(tmp_path, steps=(), state="finished")
    save_steps(run, [3, 5], best=best)
    words = (f"resume={run.path}", "checkpoint.best=val/loss")
    assert refused(config_of(tmp_path, *words, "train.stop_after=2")) == [
        "train.stop_after=2: val/loss has not improved in the last 2 evaluations; its best is 0.5 at step 3: the run "
        "to resume has ended early at step 5; raise train.stop_after"
    ]
    for more in ("train.stop_after=3", "train.stop_after=null"):
        found, _ = resume(config_of(tmp_path, *words, more))
        assert found is not None
    run.update_record(state="running")  # its driver died before it could record the end
    found, _ = resume(config_of(tmp_path, *words, "train.stop_after=2"))
    assert found is not None


# A run to evaluate ----------------------------------------------------------------------------------


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
        assert found is not None
        assert (found.run_dir.path, found.step) == (run.path, step)
        assert found.train.steps == (step if key == "evaluate" else 9)
        assert found.checkpoint == run.checkpoints / f"step-{step:08d}"
    assert source(tmp_path) is None


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


def test_what_cannot_be_evaluated_is_said_with_a_remedy(tmp_path: Path) -> None:
    run = an_earlier_run(tmp_path, steps=(5,))
    best = f"evaluate={run.path}/checkpoints/best"
    with pytest.raises(ConfigError, match=r"evaluate=.*trained without checkpoint\.best; name another checkpoint"):
        source(tmp_path, best)
    save_steps(run, [6], best=BestSoFar(metric="val/loss", direction="minimize", step=3, value=0.5))
    with pytest.raises(ConfigError, match=r"step-00000003: no such directory; the run has the checkpoints .*-00000006"):
        source(tmp_path, best)
    with pytest.raises(ConfigError, match=r"evaluate=nothing: no run directory there"):
        source(tmp_path, "evaluate=nothing")
    empty = an_earlier_run(tmp_path, steps=())
    with pytest.raises(ConfigError, match="it has no checkpoint"):
        source(tmp_path, f"evaluate={empty.path}")


def test_a_run_that_continues_from_another_one_is_told_what_differs_and_what_to_type(tmp_path: Path) -> None:
    run = an_earlier_run(tmp_path, steps=(5,))
    run.update_record(params={"job.lr": 0.5})
    warnings: list[str] = []
    assert source(tmp_path, f"start_from={run.path}", "train.steps=6", warnings=warnings) is not None
    assert warnings == [
        f"job.lr was 0.5 before; it is {JOB.lr} from now on",
        "the optimizer keeps its settings from the checkpoint, including the learning rate",
    ]
    with pytest.raises(ConfigError, match=r"train\.steps=5: start_from=.* already has 5 steps; raise it"):
        source(tmp_path, f"start_from={run.path}", "train.steps=5")
    named = f"{run.path}/checkpoints/step-00000005"
    (error,) = refused(config_of(tmp_path, f"resume={named}"))
    assert error.endswith(f"set start_from={named}, and leave out resume")

"""The preparation of a run: its places and its records."""

import dataclasses
import enum
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import yaml
from torch import nn

from helpers.files.golden import Golden
from helpers.records.earlier_runs import JOB, an_earlier_run, config_of, plan_of, refused, resume, save_steps
from jobs.digits import Digits
from orchestrator.config.build import ConfigError
from orchestrator.config.redact import MASK, Redactor
from orchestrator.config.schema import JobSpec
from orchestrator.driver.preflight.record import open_run
from orchestrator.driver.preflight.run_config import environment_errors, tracking_note
from orchestrator.records.lock import is_alive
from orchestrator.state.best import BestSoFar
from orchestrator.strategies.external.job import Script

# Places -------------------------------------------------------------------------------------------


@pytest.mark.needs("tracking")
def test_paths_are_made_absolute_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = config_of(Path("runs"))
    assert config.output_dir == str(tmp_path / "runs")
    assert config.tracking.uri == f"sqlite:///{tmp_path / 'mlflow.db'}"
    assert config_of(Path("/a/b")).output_dir == "/a/b"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert config_of(Path("~/runs")).output_dir == str(tmp_path / "home" / "runs")


@pytest.mark.needs("tracking")
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


@pytest.mark.needs("tracking")
def test_all_errors_of_the_surroundings_come_at_once(tmp_path: Path) -> None:
    config = config_of(Path("/proc/nowhere"), "tracking.uri=htp://me:hunter2@host")
    errors = environment_errors(config)
    assert [f.partition("=")[0] for f in errors] == ["tracking.uri", "output_dir"]
    assert "hunter2" not in "".join(errors)


@pytest.mark.needs("tracking")
def test_sinks_that_cannot_be_used_are_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = config_of(tmp_path, "tracking.tensorboard=true", "tracking.sinks=[wandb,jobs.digits.Digits]")
    golden.says(environment_errors(config))


@pytest.mark.needs("tracking")
def test_what_the_environment_decides_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:hunter2@host:5000")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    assert tracking_note(config_of(tmp_path)) == [
        "MLflow: MLFLOW_TRACKING_URI=http://***@host:5000, MLFLOW_EXPERIMENT_NAME=mine"
    ]
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", "7")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "3")
    assert tracking_note(config_of(tmp_path))[1:] == [
        "MLFLOW_EXPERIMENT_ID is ignored: set tracking.experiment to the name of the experiment",
        "MLFLOW_HTTP_REQUEST_TIMEOUT is ignored: set tracking.request_timeout_s",
    ]
    assert tracking_note(config_of(tmp_path, "tracking=none")) == []
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "file:///runs")
    (error,) = environment_errors(config_of(tmp_path))
    golden.says(error)


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


@pytest.mark.needs("tracking")
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


@pytest.mark.needs("scripts")
def test_a_script_has_its_arguments_as_parameters_and_none_of_what_its_code_replaces(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    args = "data.txt --lr 0.003 --warm-up=5 --sizes 1 2 --fast -x 3 --scale -1 --password hunter2 hidden=8 +a.b=c=d"
    job = Script(script=str(tmp_path / "train.py"), args=args)
    config = config_of(tmp_path, "strategy=script")
    run, _ = open_run(config, job, plan_of(config), None, command="", sweep=None, redactor=Redactor())
    params = run.read_record()["params"]
    assert {key: value for key, value in params.items() if key.startswith("args.")} == {
        "args.lr": "0.003", "args.warm_up": "5", "args.sizes": "1 2", "args.fast": "true", "args.x": "3",
        "args.scale": "-1", "args.password": MASK, "args.hidden": "8", "args.a.b": "c=d",
    }  # fmt: skip
    assert not any(key.startswith(("train.", "data.", "checkpoint.")) for key in params)
    assert params["strategy.name"] == "script"


def test_a_resumed_run_keeps_its_directory_and_identity(tmp_path: Path) -> None:
    earlier = an_earlier_run(tmp_path, state="killed")
    config = config_of(tmp_path, "resume=auto")
    found, _ = resume(config)
    run, uid = open_run(config, JOB, plan_of(config), found, command="", sweep=None, redactor=Redactor())
    assert (run, uid) == (earlier, "first")
    assert run.read_record()["state"] == "waiting"
    assert run.read_record()["tags"]["resumed_from_step"] == str(found.step)


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


@pytest.mark.slow
def test_a_run_that_has_ended_early_is_trained_further_with_more_patience(tmp_path: Path, golden: Golden) -> None:
    best = BestSoFar(metric="val/loss", direction="minimize", step=3, value=0.5, bar=0.5, evaluations_since=2)
    run = an_earlier_run(tmp_path, steps=(), state="finished")
    save_steps(run, [3, 5], best=best)
    words = (f"resume={run.path}", "checkpoint.best=val/loss")
    golden.says(refused(config_of(tmp_path, *words, "train.stop_after=2")))
    for more in ("train.stop_after=3", "train.stop_after=null"):
        found, _ = resume(config_of(tmp_path, *words, more))
        assert found is not None
    run.update_record(state="running")  # its driver died before it could record the end
    found, _ = resume(config_of(tmp_path, *words, "train.stop_after=2"))
    assert found is not None

"""`orchestrator evaluate`, up to the plan."""

from pathlib import Path

import pytest

from helpers.files.golden import Golden
from jobs.digits import Digits
from jobs.gpt import GPT
from orchestrator import evaluate
from orchestrator.config.compose import compose
from orchestrator.config.recorded_config import overrides_to_evaluate, to_dict, to_yaml
from orchestrator.job import Job
from orchestrator.records import run_dir as rundir
from orchestrator.records.run_dir import RunDir
from orchestrator.state.checkpoint import save
from orchestrator.state.train_state import capture
from orchestrator.strategies import registry

WORDS = (
    *("strategy=ddp", "strategy.bucket_mb=7", "job.hidden=4", "job.depth=2"),
    *("train.stop_after=3", "checkpoint.best=val/loss"),
)


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return run_of(tmp_path, Digits(hidden=4, depth=2), *WORDS)


def run_of(tmp_path: Path, job: Job, *words: str) -> RunDir:
    """Write what a run of ``job`` with the overrides ``words`` leaves."""
    errors: list[str] = []
    config, _ = compose(
        [*words, "seed=5", "tracking=none", "name=a b", f"output_dir='{tmp_path}'"], errors, registry.config_class
    )
    assert config is not None, errors
    run = rundir.create(tmp_path, "a b")
    run.update_record(name="a b", uid="first", state="finished")
    run.config_file.write_text(to_yaml(to_dict(config)))
    model = job.model()
    save(
        run.checkpoints,
        capture(model, job.optimizer(model.parameters()), None, step=30, samples_consumed=30),
        run_uid="a",
    )
    return run


def test_the_recorded_configuration_comes_back_without_what_is_for_training(run_dir: RunDir) -> None:
    errors: list[str] = []
    config, _ = compose(overrides_to_evaluate(run_dir.config_file, ["seed=6"]), errors, registry.config_class)
    assert config is not None, errors
    assert (config.seed, config.job.fields, config.strategy.name) == (6, {"hidden": 4, "depth": 2}, "ddp")
    assert (config.name, config.checkpoint.best, config.train.stop_after, config.tracking.uri) == (
        None,
        None,
        None,
        None,
    )
    words = overrides_to_evaluate(run_dir.config_file, ["strategy=single", "job=digits"])
    assert [word for word in words if word.startswith(("strategy", "job"))] == ["strategy=single", "job=digits"]


@pytest.mark.needs("asynchronous")
def test_a_record_with_keys_that_have_gone_since_can_be_evaluated(tmp_path: Path) -> None:
    file = run_of(tmp_path, Digits(hidden=4, depth=2), "strategy=parameter_server").config_file
    recorded = file.read_text()
    for now, before in (
        ("consistency: sync", "consistency: stale\n  max_staleness: 4\n  compression: bf16"),
        ("peer_copy_every: 0", "peer_copy_every: 9"),
    ):
        assert now in recorded
        recorded = recorded.replace(now, before)
    file.write_text(recorded)
    errors: list[str] = []
    config, _ = compose(overrides_to_evaluate(file, []), errors, registry.config_class)
    assert config is not None, errors
    assert (config.strategy.name, config.recovery.peer_copy_every) == ("parameter_server", 0)


def test_the_verb_plans_an_evaluation_under_another_strategy(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    before = run_dir.record_file.read_bytes()
    words = [str(run_dir.path), "--split", "val", "strategy=single", "plan=true"]
    assert evaluate.main(words) == 0
    assert "strategy single" in capsys.readouterr().out
    assert run_dir.record_file.read_bytes() == before


@pytest.mark.slow
def test_other_data_is_the_validation_set_of_the_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    fields = {"layers": 1, "width": 8, "heads": 1, "context": 4}
    trained_on = [tmp_path / "first.txt", tmp_path / "second.txt"]
    words = [f"job.{name}={value}" for name, value in fields.items()]
    words += [f"job.path=[{','.join(map(str, trained_on))}]", "job.path_weights=[1,2]", "train.eval_splits=[]"]
    for path in trained_on:
        path.write_bytes(b"what is gone when the run is evaluated\n" * 4)
    run = run_of(tmp_path, GPT(**fields), "job=gpt", *words)
    for path in trained_on:
        path.unlink()
    mine, missing = tmp_path / "mine, and 1.txt", tmp_path / "missing.txt"
    mine.write_bytes(b"a text of one line\n")
    common = [str(run.path), "strategy=single", "plan=true"]
    assert evaluate.main([*common, "--data", str(mine), "--data", str(mine)]) == 0
    assert evaluate.main([*common, "--data", str(missing)]) == 2
    assert f"job.path={missing}: cannot be read" in capsys.readouterr().err
    assert evaluate.main([*common, "--split", "val"]) == 2
    assert f"job.path={trained_on[0]}: cannot be read" in capsys.readouterr().err


def test_a_job_without_fields_for_data_is_refused(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str], golden: Golden
) -> None:
    assert evaluate.main([str(run_dir.path), "--data", "mine.txt"]) == 2
    golden.says(capsys.readouterr().err)


def test_a_run_that_does_not_exist_and_a_cluster_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate.main(["nothing", "--output-dir", str(tmp_path)]) == 2
    assert "nothing: there are no runs in" in capsys.readouterr().err
    assert evaluate.main(["nothing", "--address", "http://head:8265"]) == 2
    assert "use `orchestrator submit` with evaluate=<run>" in capsys.readouterr().err

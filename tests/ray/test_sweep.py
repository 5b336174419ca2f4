"""Several runs in one command, side by side."""

import json
import re
from pathlib import Path

import pytest
from mlflow import MlflowClient

from helpers.records.runs import wait_for
from orchestrator import compare, launch
from orchestrator.records.run_dir import RunDir

WORDS = ["-m", "strategy=single,ddp", "train.steps=40", "job.hidden=32", "profile=true"]


def test_the_runs_of_a_sweep_are_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert launch.main([*WORDS, "tracking=none"]) == 0
    records = [RunDir(p.parent).read_record() for p in sorted(tmp_path.glob("outputs/*/*/run.json"))]
    assert [r["strategy"] for r in records] == ["single", "ddp"]
    printed = capsys.readouterr().out
    assert re.search(r"run 2 of 2: strategy=ddp; about (\d+m)?\d+s left\n", printed)
    assert re.search(r"fastest[^:]*: \w+ x\d with .* samples/s", printed)
    assert f"profile: {records[1]['summary']['profile']} (open in" in " ".join(printed.split())
    (sweep,) = (tmp_path / "outputs" / "sweeps").iterdir()
    assert "| strategy | workers | samples/s |" in (sweep / "report.md").read_text()
    assert compare.main(["--sweep", sweep.name[:8], "--no-picture"]) == 0
    table = capsys.readouterr().out
    for word in ("single", "ddp", "samples/s"):
        assert word in table


@pytest.mark.campaign  # ``test_tracked_sweeps.py`` has the sweep in MLflow
def test_the_runs_of_a_sweep_are_side_by_side_in_mlflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tracking = ["tracking.flush_timeout_s=200", "tracking.log_model=false", "tracking.log_dataset=false"]
    assert launch.main([*WORDS, *tracking]) == 0
    run_dirs = [RunDir(p.parent) for p in sorted(tmp_path.glob("outputs/*/*/run.json"))]
    records = [run_dir.read_record() for run_dir in run_dirs]
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    runs = [client.get_run(r["mlflow_run_id"]) for r in records]
    (sweep_id,) = {run.data.tags["sweep_id"] for run in runs}
    (own,) = client.search_runs([runs[0].info.experiment_id], f"tags.`orchestrator.sweep_id` = '{sweep_id}'")
    assert (own.info.status, own.info.run_name) == ("FINISHED", "sweep: strategy=single,ddp")
    (sweep,) = (tmp_path / "outputs" / "sweeps").iterdir()
    assert {r["sweep"]["id"] for r in records} == {sweep.name}
    printed = capsys.readouterr().out
    page = f"charts: http://127.0.0.1:5000/#/experiments/1/runs?viewStateShareKey=sweep-{sweep_id[:8]}"
    assert printed.splitlines()[-1].startswith(page)
    assert "run 1 of 2: strategy=single\n" in printed
    assert re.findall("next: .*", printed) == [f"next: mlflow ui --backend-store-uri sqlite:///{tmp_path}/mlflow.db"]
    assert (sweep / "compare.png").stat().st_size > 10_000
    wait_for(lambda: "mlflow.note.content" in client.get_run(own.info.run_id).data.tags, "the report in MLflow")

    artifacts = {file.path for file in client.list_artifacts(runs[1].info.run_id, "profile")}
    assert artifacts == {f"profile/{name}" for name in ("rank-0.json", "rank-1.json")}


@pytest.mark.campaign
def test_a_search_trains_with_the_values_that_it_chooses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["-m", "strategy=single", "tracking=none", "train.steps=4", "sweep.trials=2", "job.lr=interval(0.1,0.5)"]
    assert launch.main([*words, "job.hidden=16"]) == 0
    records = [json.loads(p.read_text()) for p in sorted(tmp_path.glob("outputs/*/*/run.json"))]
    (sweep_id,) = {record["sweep"]["id"] for record in records}
    losses = {record["sweep"]["run"]: record["summary"]["val_loss"] for record in records}
    assert sorted(losses) == ["1", "2"]
    best = min(losses, key=lambda number: float(losses[number]))
    printed = capsys.readouterr().out
    (lr,) = re.findall(rf"run {best} of 2: job.lr=(\S+)", printed)
    assert f"best of 2 runs: run {best}, val_loss {losses[best]:.6g}, with job.lr={lr}\n" in printed
    assert (tmp_path / "outputs" / "sweeps" / sweep_id / "report.md").is_file()


@pytest.mark.campaign
def test_a_search_ends_a_poor_run_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["-m", "strategy=single", "job._target_=helpers.jobs.leisurely_job.Leisurely", "job.pause_ms=50"]
    words += ["tracking=none", "train.steps=60", "train.eval_every=5", "checkpoint.every=0", "seed=10"]
    words += ["job.lr=tag(log,interval(1e-4,0.5))", "sweep.trials=2", "sweep.pruner=asha", "sweep.reduction_factor=2"]
    assert launch.main(words) == 0
    printed = capsys.readouterr().out
    good, poor = [json.loads(p.read_text()) for p in sorted(tmp_path.glob("outputs/*/*/run.json"))]
    assert [good["state"], poor["state"]] == ["finished", "pruned"]
    assert 5 <= poor["summary"]["steps"] < 60
    assert poor["reason"] == f"pruned at step {poor['summary']['steps']}"
    assert f"\n{poor['reason']}\n" in printed
    assert "best of 1 run: run 1, val_loss " in printed
    assert printed.count("; 1 pruned\n") == 1
    assert "SIGTERM" not in printed
    assert compare.main(["--sweep", "last", "--no-picture"]) == 0
    assert re.search(r"pruned +single +1 +lr=0.0001", capsys.readouterr().out)


@pytest.mark.campaign
def test_a_failing_run_stops_no_other_and_a_resumed_sweep_repeats_only_that_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["-m", "strategy=single", "tracking=none", "train.steps=30", "checkpoint.every=20", "job.hidden=16"]
    words += ["recovery.max_failures=0", "recovery.chaos=[raise@25:0],[]"]
    assert launch.main(words) == 1
    printed = capsys.readouterr().out
    assert "run 2 of 2: 'recovery.chaos=[]'" in printed or "run 2 of 2: recovery.chaos=[]" in printed
    assert "not finished: 1 run; continue the sweep with: " in printed
    records = {p.parent: json.loads(p.read_text()) for p in sorted(tmp_path.glob("outputs/*/*/run.json"))}
    assert [r["state"] for r in records.values()] == ["failed", "finished"]

    assert launch.main([*words, "resume=auto"]) == 1
    printed = capsys.readouterr().out
    assert "1 of 2 runs finished before" in printed
    assert "resumed from step 20" in printed
    assert printed.count("digits-single: strategy single") == 1
    assert {p.parent for p in tmp_path.glob("outputs/*/*/run.json")} == set(records)
    (sweep,) = (tmp_path / "outputs" / "sweeps").iterdir()
    assert "finished" in (sweep / "report.md").read_text()


def test_runs_that_do_not_fit_are_left_out_where_the_sweep_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert launch.main(["-m", "experiment=compare", "train.global_batch_size=1", "plan=true"]) == 0
    output = capsys.readouterr()
    assert "left out: strategy=ddp: train.global_batch_size=1: fewer than one sample" in output.out
    assert re.search(r"\n\nrun \d: strategy=single\nplan: digits-single\n", output.out)
    assert launch.main(["experiment=compare", "plan=true"]) == 2
    assert "experiment=compare: a sweep of several runs; add -m" in capsys.readouterr().err
    # One run of it, as the command that continues this run has it.
    assert launch.main(["experiment=compare", "strategy=single", "sweep.unfit=skip", "plan=true"]) == 0
    assert launch.main(["-m", "experiment=compare", "train.steps=0"]) == 2
    assert "train.steps=0" in capsys.readouterr().err


@pytest.mark.campaign
def test_the_scaling_preset_compares_the_numbers_of_workers_that_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["strategy.num_workers=1,2,64", "train.steps=20", "train.log_every=5", "job.hidden=16", "tracking=none"]
    assert launch.main(["-m", "experiment=scaling", *words]) == 0
    assert "left out: strategy.num_workers=64: needs 64 x 1 CPUs" in capsys.readouterr().out
    (sweep,) = (tmp_path / "outputs" / "sweeps").iterdir()
    assert "| speed | scaling |" in (sweep / "report.md").read_text()


def test_one_bad_run_stops_a_sweep_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert launch.main(["-m", "train.steps=10,0"]) == 2
    assert "train.steps=0" in capsys.readouterr().err
    assert not list(tmp_path.glob("outputs/*/*"))

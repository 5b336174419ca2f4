"""Several runs in one command, side by side."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mlflow import MlflowClient

from orchestrator import compare, launch


def test_the_runs_of_a_sweep_are_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert (
        launch.main(["-m", "strategy=single,ddp", "train.steps=40", "job.hidden=32", "tracking.log_model=false"]) == 0
    )
    records = [json.loads(p.read_text()) for p in sorted(tmp_path.glob("outputs/*/*/run.json"))]
    assert [r["strategy"] for r in records] == ["single", "ddp"]

    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    runs = [client.get_run(r["mlflow_run_id"]) for r in records]
    (sweep_id,) = {run.data.tags["sweep_id"] for run in runs}
    (own,) = client.search_runs([runs[0].info.experiment_id], f"tags.`orchestrator.sweep_id` = '{sweep_id}'")
    assert (own.info.status, own.info.run_name) == ("FINISHED", "sweep: strategy=single,ddp")
    assert capsys.readouterr().out.splitlines()[-1].startswith("charts: http://127.0.0.1:5000/#/experiments/")

    capsys.readouterr()
    assert compare.main(["--last", "2"]) == 0
    table = capsys.readouterr().out
    for word in ("single", "ddp", "samples/s"):
        assert word in table
    assert (tmp_path / "outputs" / "compare.png").stat().st_size > 10_000


def test_one_bad_run_stops_a_sweep_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert launch.main(["-m", "train.steps=10,0"]) == 2
    assert "train.steps=0" in capsys.readouterr().err
    assert not list(tmp_path.glob("outputs/*/*"))

"""What is uploaded and suggested after the last run of a sweep."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.conformance.cases import Case, config_of
from helpers.files.golden import Golden
from helpers.jobs.quick_jobs import digits
from orchestrator.config.redact import Redactor
from orchestrator.driver.process.run_context import RunResult
from orchestrator.features.sweep.several_runs import _publish
from orchestrator.records import run_dir as rundir


@pytest.mark.parametrize("record", ["{}", "{"], ids=["without a driver", "damaged"])
def test_a_last_run_whose_record_is_damaged_costs_only_the_upload_of_the_comparison(
    record: str, tmp_path: Path, golden: Golden
) -> None:
    run_dir = rundir.create(tmp_path, "digits-ddp")
    run_dir.record_file.write_text(record)
    said: list[str] = []
    sweep: Any = SimpleNamespace(say=said.append)
    tracking = replace(config_of(Case(job=digits()), 1).tracking, uri="sqlite:///runs.db")
    candidate: Any = SimpleNamespace(config=SimpleNamespace(tracking=tracking), redactor=Redactor())
    last = RunResult(status="FINISHED", exit_code=0, run_dir=run_dir.path, summary={"mlflow_page": "http://page"})
    _publish(sweep, candidate, last)
    golden.says(said[0], RECORD=run_dir.record_file)
    assert said[1:] == ["next: mlflow ui --backend-store-uri sqlite:///runs.db", "charts: http://page"]

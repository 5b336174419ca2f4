"""A submitted job whose process has embedded a Ray of its own."""

import json

import pytest

from orchestrator.compat.ray.gcs import add_job_metadata


def test_a_ray_that_does_not_know_the_job_gets_no_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    job = {"metadata": {"job_submission_id": "digits-ddp-1122"}}
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps(job))
    add_job_metadata({"run_dir": "/runs/1"})

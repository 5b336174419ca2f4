"""The submitted job that a process belongs to, for processes that must not import Ray. Checked with Ray 2.60.0."""

from __future__ import annotations

import json
import os

JOB_CONFIG_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Ray sets it for the command of a submitted job; ``tests/unit/compat/test_compat_ray.py`` compares the name."""


def submission_id() -> str | None:
    """Return the id of the submitted job to which this process belongs; None if it belongs to none."""
    job = json.loads(os.environ.get(JOB_CONFIG_VARIABLE, "{}"))
    found: str | None = job.get("metadata", {}).get("job_submission_id")
    return found

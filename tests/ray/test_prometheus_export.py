"""The metrics of a run at the port that Prometheus scrapes."""

import re
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray

from helpers.records.runs import series, wait_for
from orchestrator.config.overrides import quote_text
from orchestrator.driver.reporting import GAUGES, LABELS, NAMESPACE


def exported(run_name: str) -> dict[str, float]:
    """The gauges of a run that the agent of Ray exports, by name."""
    port = ray.nodes()[0]["MetricsExportPort"]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    label = run_name.replace("\\", "\\\\").replace('"', '\\"')
    own = [line for line in lines if line.startswith(f"{NAMESPACE}_orchestrator_") and f'run="{label}"' in line]
    for line in own:
        assert all(f'{label}="' in line for label in LABELS), line
    return {re.split("[{ ]", line)[0].removeprefix(f"{NAMESPACE}_"): float(line.rsplit(" ", 1)[1]) for line in own}


def test_the_values_of_a_run_are_exported(run: Callable[..., Any]) -> None:
    name = 'exported "run", {1} \\ [x]='
    words = ("strategy=single", "job=toy", "train.steps=30", "train.log_every=5")
    result = run(*words, f"name={quote_text(name)}")
    assert result.status == "FINISHED"
    run_dir = Path(result.run_dir)
    expected = {
        "orchestrator_loss": series(run_dir, "train/loss")[30],
        "orchestrator_samples_per_s": series(run_dir, "perf/samples_per_s")[30],
        "orchestrator_step": 30.0,
        "orchestrator_workers": 1.0,
        "orchestrator_restarts": 0.0,
    }
    assert expected.keys() == GAUGES.keys()
    wait_for(lambda: exported(name) == expected, "the export of the last values")

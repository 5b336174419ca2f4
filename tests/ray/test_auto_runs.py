"""``strategy=auto``: from the measurements on the workers to a run of the strategy that they favour."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from helpers.runs import losses

SAMPLE_MS = 4
JOB = ("job._target_=helpers.proportional_job.Proportional", f"job.sample_ms={SAMPLE_MS}",
       "train.global_batch_size=32", "checkpoint.every=4")  # fmt: skip
CHOICE = ("strategy=auto", "strategy.candidates=[single,ddp,model_parallel]", "strategy.measured_steps=5")


def test_auto_trains_with_the_fastest_strategy_and_resumes_with_it(
    run: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two workers halve the steps of this job, because their passes sleep in proportion to their samples."""
    first = run(*JOB, *CHOICE, "train.steps=8")
    assert first.status == "FINISHED", first.reason
    record = json.loads((first.run_dir / "run.json").read_text())
    assert record["strategy"] == "ddp"
    assert record["tags"]["strategy.chosen_by"] == "auto"
    assert yaml.safe_load((first.run_dir / "config.yaml").read_text())["strategy"]["name"] == "ddp"
    assert "strategy=ddp strategy.num_workers=2" in record["command"]
    assert "`strategy=auto` chose **ddp num_workers=2** (predicted " in record["description"]
    assert "auto.json" in {f.name for f in first.run_dir.iterdir()}
    table = (first.run_dir / "auto.md").read_text()
    choice = table.splitlines()[-1]
    assert choice.startswith("auto chooses strategy=ddp strategy.num_workers=2: ")
    assert choice in capsys.readouterr().out

    chosen = json.loads((first.run_dir / "auto.json").read_text())
    measured = {c["name"]: c for c in chosen["contenders"] if c["measured_ms"] is not None}
    assert len(measured) == 2
    assert measured["ddp num_workers=2"]["measured_ms"] > 16 * SAMPLE_MS
    assert not list((tmp_path / "outputs" / "auto").glob("*/*")), "the runs that measured are removed"

    assert run(*JOB, *CHOICE, "train.steps=8", "plan=true") is None
    printed = capsys.readouterr().out
    assert "auto uses the measurements in " in printed
    assert re.search(r"auto chooses strategy=\S+ .* ms per step \(predicted\)", printed)

    second = run(*JOB, *CHOICE, "train.steps=12", f"resume={first.run_dir}")
    assert second.run_dir == first.run_dir
    assert max(losses(second.run_dir)) == 12
    assert "auto chooses" not in capsys.readouterr().out

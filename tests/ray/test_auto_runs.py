"""``strategy=auto``: from predictions and measurements to a run of the strategy that they favour."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.features.auto.choice import WORTH_A_WORKER

JOB = ("job.hidden=8", "train.eval_every=0", "checkpoint.every=4")
CHOICE = ("strategy=auto", "strategy.candidates=[single,ddp]", "strategy.measured=1", "strategy.measured_steps=5")


def test_auto_trains_with_the_fastest_strategy_and_resumes_with_it(
    run: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which one is the fastest depends on what else the machine does."""
    first = run(*JOB, *CHOICE, "train.steps=8")
    assert first.status == "FINISHED", first.reason
    chosen = json.loads((first.run_dir / "auto.json").read_text())
    measured = [contender for contender in chosen["contenders"] if contender["measured_ms"] is not None]
    least_ms = min(contender["measured_ms"] for contender in measured)
    close = [c for c in measured if c["measured_ms"] <= least_ms * (1 + WORTH_A_WORKER)]
    fastest = min(close, key=lambda contender: (contender["world_size"], contender["measured_ms"]))
    assert chosen["overrides"] == fastest["overrides"]
    typed = " ".join(fastest["overrides"])
    strategy = fastest["overrides"][0].removeprefix("strategy=")

    record = json.loads((first.run_dir / "run.json").read_text())
    assert record["strategy"] == strategy
    assert record["tags"]["strategy.chosen_by"] == "auto"
    assert yaml.safe_load((first.run_dir / "config.yaml").read_text())["strategy"]["name"] == strategy
    assert typed in record["command"]
    assert f"`strategy=auto` chose **{fastest['name']}** (predicted " in record["description"]
    choice = (first.run_dir / "auto.md").read_text().splitlines()[-1]
    assert choice.startswith(f"auto chooses {typed}: ")
    assert choice in capsys.readouterr().out
    assert not list((tmp_path / "outputs" / "auto").glob("*/*")), "the runs that measured are removed"

    assert run(*JOB, *CHOICE, "train.steps=12", f"resume={first.run_dir}", "plan=true") is None
    printed = capsys.readouterr().out
    assert re.search(rf"strategy +{strategy}", printed), printed
    assert "auto chooses" not in printed

"""What a run left behind, and waiting for what it is about to do."""

import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from orchestrator.records.journal import read_metrics
from orchestrator.records.run_dir import RunDir

TESTS = Path(__file__).resolve().parents[2]
ROOT = TESTS.parent
PYTHONPATH = os.pathsep.join(map(str, (TESTS, ROOT)))
"""For processes that load a job of this package, such as ``helpers.jobs.faulty_jobs.Faulty``."""


def in_campaign(*values: Any) -> list[Any]:
    """Parameters that only ``pytest -m campaign`` runs."""
    return [
        pytest.param(*v, marks=pytest.mark.campaign)
        if isinstance(v, tuple)
        else pytest.param(v, marks=pytest.mark.campaign)
        for v in values
    ]


def losses(run_dir: Path) -> dict[int, float]:
    """``train/loss`` by step."""
    return series(run_dir, "train/loss")


def series(run_dir: Path, name: str) -> dict[int, float]:
    """A metric by step, from ``metrics.jsonl``."""
    points = [(step, metrics[name]) for step, _, metrics in read_metrics(RunDir(run_dir)) if name in metrics]
    assert len({step for step, _ in points}) == len(points), f"double points of {name}"
    return dict(points)


def events(run_dir: Path, *kinds: str) -> Sequence[dict[str, Any]]:
    """The events of some kinds in their order, from ``events.jsonl``."""
    return [line for line in _lines(run_dir / "events.jsonl") if line["event"] in kinds]


def events_below(folder: Path, kind: str) -> Sequence[dict[str, Any]]:
    """The events of one kind of the run below ``folder``; none before it has begun."""
    return [event for file in folder.glob("outputs/*/*/events.jsonl") for event in events(file.parent, kind)]


def run_dirs(folder: Path) -> list[Path]:
    """The directories of the runs below ``folder``, the oldest first."""
    return [record.parent for record in sorted(folder.glob("outputs/*/*/run.json"))]


def last_step(folder: Path) -> int:
    """The last step that the run below ``folder`` has logged; 0 before the first."""
    files = folder.glob("outputs/*/*/metrics.jsonl")
    return max((step for file in files for step in losses(file.parent)), default=0)


def wait_for_step(folder: Path, step: int, *, timeout_s: float = 300) -> Path:
    """Wait until the run below ``folder`` has logged ``step``; returns its directory."""
    wait_for(lambda: last_step(folder) >= step, f"step {step}", timeout_s=timeout_s)
    (metrics,) = folder.glob("outputs/*/*/metrics.jsonl")
    return metrics.parent


def _lines(file: Path) -> list[dict[str, Any]]:
    text = file.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]  # one may be under way


def pid_of_rank(folder: Path, rank: int, *, after_step: int) -> int:
    """The process of a rank of the run below ``folder``, as soon as ``after_step`` is logged."""
    (started,) = events(wait_for_step(folder, after_step), "generation_started")
    return int(started["workers"][rank].rpartition(" ")[2])


def wait_for(
    condition: Callable[[], Any], what: str = "the condition", *, timeout_s: float = 300, poll_s: float = 0.1
) -> Any:
    """Return the first true value of ``condition()``, which is called every ``poll_s``.

    Raises:
        AssertionError: if there is none within ``timeout_s``.
    """
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}"
        time.sleep(poll_s)
    return found

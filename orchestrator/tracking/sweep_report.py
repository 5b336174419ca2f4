"""The report of a sweep, as the driver writes it below the output directory when the last run has ended."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from orchestrator.records.output_dir import OutputDir
from orchestrator.records.run_dir import RunDir
from orchestrator.records.sweep_dir import SweepDir

TEXT = "report.md"


def find_report(run_dir: RunDir, sweep: Mapping[str, str]) -> list[Path]:
    """Return the files of the report of the sweep that a run belongs to; empty if there is none."""
    directory = SweepDir.of(OutputDir.containing(run_dir), sweep["id"])
    return [path for path in (directory.report, directory.picture) if path.is_file()]

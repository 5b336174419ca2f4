"""The report of a sweep, as the driver writes it below the output directory when the last run has ended."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from orchestrator.records.run_dir import RunDir

TEXT = "report.md"
FILES = (TEXT, "compare.png", "report.html")


def find_report(run_dir: RunDir, sweep: Mapping[str, str]) -> list[Path]:
    """Return the files of the report of the sweep that a run belongs to; empty if there is none.

    The runs of a sweep may lie in directories of two days. The report is beside one of them.
    """
    folders = run_dir.path.parents[1].glob(f"*/sweeps/{sweep['id']}")
    return [path for folder in folders for name in FILES if (path := folder / name).is_file()]

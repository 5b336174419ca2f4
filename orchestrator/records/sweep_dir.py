"""What a sweep leaves on disk: which runs it has, and the report that compares them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.records.json_file import read_json, write_json
from orchestrator.records.output_dir import OutputDir
from orchestrator.records.run_dir import RunDir
from orchestrator.storage.remote import Remote

SWEEPS = "sweeps"
VARIABLE = "ORCHESTRATOR_SWEEP"
"""Tells a driver which run of which sweep it executes."""
REPORT = "report.md"
_RECORD = "sweep.json"
_TYPES = {"id": str, "runs": list, "left_out": list, "search": dict, "search.tried": list}


@dataclass(frozen=True)
class SweepDir:
    """The directory ``<output_dir>/sweeps/<id>/``; ``remote`` is the same on a store, if ``output_dir`` is a URL."""

    path: Path
    remote: Remote | None = None

    @classmethod
    def of(cls, output: OutputDir, sweep_id: str) -> SweepDir:
        """Return the directory of the sweep ``sweep_id``, which may not exist."""
        name = f"{SWEEPS}/{sweep_id}"
        return cls(output.path / name, None if output.remote is None else output.remote.child(name))

    @property
    def report(self) -> Path:
        return self.path / REPORT

    @property
    def picture(self) -> Path:
        return self.path / "compare.png"

    def report_files(self) -> list[Path]:
        """Return the files of the report; empty if the sweep has none yet."""
        return [path for path in (self.report, self.picture) if path.is_file()]

    def location_of(self, path: Path) -> str:
        """Return where the user finds the file ``path`` of the sweep."""
        return str(path if self.remote is None else self.remote.child(path.name))

    def read_record(self) -> dict[str, Any]:
        """Return what :meth:`write_record` wrote; empty if there is nothing.

        Raises:
            ValueError: the record is damaged.
        """
        return read_json(self.path / _RECORD, _TYPES)

    def write_record(self, record: Mapping[str, Any]) -> None:
        """Write the record of the sweep.

        Raises:
            OSError: it cannot be written.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        write_json(self.path / _RECORD, record)
        self.upload(self.path / _RECORD)

    def upload(self, *files: Path) -> None:
        """Copy files of the sweep to the store, if there is one.

        Raises:
            StorageError: the store cannot be used.
        """
        if self.remote is not None:
            for file in files:
                self.remote.put(file, file.name)


def carried(membership: Mapping[str, str]) -> Mapping[str, str]:
    """Return the environment variable that tells a driver its run of the sweep.

    ``membership``: the id and name of the sweep, the number of the run, and the settings in which it differs from the
    others.
    """
    return {VARIABLE: json.dumps(dict(membership))}


def membership() -> dict[str, str] | None:
    """Return what :func:`carried` told this process; None if it executes no run of a sweep."""
    text = os.environ.get(VARIABLE)
    return None if text is None else json.loads(text)


def all_sweeps(output: OutputDir) -> Iterator[SweepDir]:
    """Yield every sweep that has a record, the newest first.

    Raises:
        StorageError: the store cannot be used.
    """
    if output.remote is not None:
        for entry in output.remote.list(SWEEPS):
            sweep = SweepDir.of(output, entry.name)
            assert sweep.remote is not None
            if any(file.name == _RECORD for file in sweep.remote.list()):
                sweep.remote.fetch(_RECORD, sweep.path / _RECORD)
    records = (output.path / SWEEPS).glob(f"*/{_RECORD}")
    for record in sorted(records, key=lambda path: path.stat().st_mtime, reverse=True):
        yield SweepDir.of(output, record.parent.name)


def runs_of(
    output: OutputDir, sweep_id: str, on_damaged: Callable[[str], None] = lambda text: None
) -> dict[int, RunDir]:
    """Return the newest run directory of each run of the sweep, by the number of the run.

    Calls ``on_damaged`` for each record in ``output`` that is damaged and may belong to the sweep.

    Raises:
        StorageError: the store cannot be used.
    """
    found: dict[int, RunDir] = {}
    for run_dir in output.runs():
        try:
            sweep = run_dir.read_record().get("sweep") or {}
        except (OSError, ValueError) as e:
            on_damaged(f"run skipped: {e}")
            continue
        if sweep.get("id") == sweep_id and str(sweep.get("run", "")).isdecimal():
            found.setdefault(int(sweep["run"]), run_dir)
    return found

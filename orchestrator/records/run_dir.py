"""The run directory: where things lie, and the state of a run as others may read it."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

LEASE_S = 60.0
"""A driver on another host that has been silent for so long is gone."""

CRASH = "Fatal Python error: "
"""What a process that crashes (SIGSEGV, SIGABRT, ...) writes to its log before where it was."""


@dataclass(frozen=True)
class RunDir:
    """``<output_dir>/<date>/<time>-<name>/``."""

    path: Path

    @property
    def record_file(self) -> Path:
        return self.path / "run.json"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def events_file(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def config_file(self) -> Path:
        return self.path / "config.yaml"

    @property
    def tracking_file(self) -> Path:
        """How far the upload to MLflow has come."""
        return self.path / "tracking.json"

    @property
    def timeline_picture(self) -> Path:
        return self.path / "timeline.png"

    @property
    def timeline_trace(self) -> Path:
        return self.path / "timeline.json"

    @property
    def profile(self) -> Path:
        return self.path / "profile"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def stacks_file(self, generation: int) -> Path:
        """What every rank was doing when one of this generation hung."""
        return self.path / "logs" / f"stacks-generation-{generation}.txt"

    def log_file(self, rank: int) -> Path:
        return self.path / "logs" / f"rank-{rank}.log"

    @property
    def lease_file(self) -> Path:
        """Touched every few seconds by the driver, for other hosts to see that it lives."""
        return self.path / "lease"

    @property
    def fence_file(self) -> Path:
        """Which generation may save."""
        return self.path / "fence"

    def driver_if_running(self) -> dict[str, Any] | None:
        """The process that drives the run, as far as can be told from here; None: none does.

        Raises:
            ValueError: the record is damaged.
        """
        record = self.read_record()
        driver: dict[str, Any] = record.get("driver", {})
        if record.get("state") != "running":
            return None
        elsewhere = driver.get("host") != socket.gethostname()
        return driver if (self._lease_is_fresh() if elsewhere else is_alive(driver)) else None

    def _lease_is_fresh(self) -> bool:
        try:
            renewed = max(self.lease_file.stat().st_mtime, self.record_file.stat().st_mtime)
        except FileNotFoundError:
            renewed = self.record_file.stat().st_mtime
        return time.time() - renewed < LEASE_S

    def read_record(self) -> dict[str, Any]:
        """``run.json``; empty if there is none yet."""
        return read_json(self.record_file)

    def update_record(self, **values: Any) -> None:
        write_json(self.record_file, {**self.read_record(), **values})


def create(output_dir: Path, name: str) -> RunDir:
    """A new, empty run directory.

    Raises:
        OSError: the directory cannot be made or written.
    """
    now = datetime.now()
    day = output_dir / now.strftime("%Y-%m-%d")
    day.mkdir(parents=True, exist_ok=True)
    stem = f"{now:%H-%M-%S}-{name}"
    for attempt in range(1, 1000):
        path = day / (stem if attempt == 1 else f"{stem}-{attempt}")
        try:
            path.mkdir()
        except FileExistsError:
            continue
        for folder in ("logs", "checkpoints"):
            (path / folder).mkdir()
        return RunDir(path.resolve())
    raise OSError(f"no free name for a run directory like {day / stem}")


def all_runs(output_dir: Path) -> Iterator[RunDir]:
    """Every run below ``output_dir``, the newest first."""
    records = output_dir.glob("*/*/run.json")
    for record in sorted(records, key=lambda p: p.parent.parts[-2:], reverse=True):
        yield RunDir(record.parent.resolve())


def this_process() -> dict[str, Any]:
    """Enough to tell later whether this very process still lives."""
    me = psutil.Process()
    return {"host": socket.gethostname(), "pid": me.pid, "created": me.create_time()}


def process_started_at() -> float:
    """When this process was created, seconds since the epoch, to 10 ms.

    psutil's ``create_time`` counts from a boot time in whole seconds, and is up to a second off.
    """
    started_ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age_s


def is_alive(process: Mapping[str, Any]) -> bool:
    """Whether the process of :func:`this_process`, which was one of this host, lives."""
    try:
        found = psutil.Process(int(process["pid"]))
        return abs(found.create_time() - process["created"]) < 1 and found.status() != "zombie"
    except (psutil.Error, KeyError):
        return False


def log_tail(path: Path, lines: int = 20) -> str:
    """The last lines of a log, or a crash report in it from its head on; empty if unreadable here."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return ""
    _, crash, report = text.rpartition(CRASH)
    return "\n".join((crash + report).splitlines()[: 4 * lines] if crash else text.splitlines()[-lines:])


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no file.

    Raises:
        ValueError: the file is damaged; the text names it.
    """
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except ValueError as e:
        raise ValueError(f"{path} is damaged: {e}") from e
    if not isinstance(data, dict):
        raise ValueError(f"{path} is damaged: expected an object")
    return data


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write beside and rename, so that a reader never sees half a file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(data, indent=2, default=str) + "\n")
    temporary.replace(path)

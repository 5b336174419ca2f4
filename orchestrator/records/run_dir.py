"""The run directory: its files, and the state of a run as other processes read it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, get_args

from orchestrator.protocol.events import RunState
from orchestrator.records.json_file import Types, read_json, write_json
from orchestrator.records.lock import changed_at, is_alive, is_visible, locked, now_on
from orchestrator.storage.remote import Remote


def files_below(folder: Path) -> Iterator[Path]:
    """Yield every file below ``folder``, without what vanishes meanwhile."""
    for parent, _, names in os.walk(folder):
        yield from (Path(parent) / name for name in names)


def folders_in(folder: Path) -> list[Path]:
    """Return the folders in ``folder``; none if it has vanished, or if this process may not list it."""
    try:
        return [path for path in folder.iterdir() if path.is_dir()]
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []


LEASE_S = 60.0
"""A driver that cannot be seen from here counts as dead after this time without a renewal of its lease."""

END_STATES: tuple[RunState, ...] = ("finished", "pruned", "failed", "killed")
ACTIVE_STATES: tuple[RunState, ...] = tuple(state for state in get_args(RunState) if state not in END_STATES)
DIED = "died"
"""The state of a run that has not ended and that no process drives."""
WHAT_DIED = "its driver has died; the same command with resume=auto continues the run from its newest checkpoint"
STATES_WITHOUT_END = (*ACTIVE_STATES, DIED)
"""The states of a run that has not ended."""

_TYPES: Types = {
    **dict.fromkeys(("name", "uid", "state", "command", "location"), str),
    **dict.fromkeys(("driver", "plan", "plan.mesh", "params", "tags", "source", "tracking", "sweep", "summary"), dict),
    **dict.fromkeys(("plan.steps", "plan.global_batch_size", "plan.world_size"), int),
    **dict.fromkeys(("sweep.id", "tracking.uri"), str),
    **dict.fromkeys(("started", "ended"), (int, float)),
}
"""Of ``run.json``, what others than the driver of the run read."""
_RESERVE_BYTES = 256 << 10
_CHECKPOINT = re.compile(r"(.+)/checkpoints/(best|step-\d+)/?")


class _Entry:
    """The path of a file or directory of a run, as a property of :class:`RunDir`."""

    def __init__(self, name: str):
        self._name = name

    def __get__(self, run_dir: RunDir, _: type[RunDir] | None = None) -> Path:
        return run_dir.path / self._name


@dataclass(frozen=True)
class RunDir:
    """The directory ``<output_dir>/<date>/<time>-<name>/`` of a run.

    Attributes:
        remote: the same directory on a store, if ``output_dir`` is a URL; ``path`` stages it then.
    """

    path: Path
    remote: Remote | None = None

    record_file = _Entry("run.json")
    """State, plan, configuration and summary of the run."""
    metrics_file = _Entry("metrics.jsonl")
    events_file = _Entry("events.jsonl")
    config_file = _Entry("config.yaml")
    tracking_file = _Entry("tracking.json")
    """The progress of the upload to MLflow."""
    choice_record = _Entry("auto.json")
    """The contenders of ``strategy=auto``, and which of them was chosen."""
    choice_report = _Entry("auto.md")
    """The same as a table, and the reason."""
    timeline_trace = _Entry("timeline.json")
    profile = _Entry("profile")
    sinks = _Entry("sinks")
    """What the sinks of ``tracking.sinks`` and TensorBoard have written."""
    samples = _Entry("samples")
    """The texts and images that the job has drawn from the model."""
    logs = _Entry("logs")
    """The output of each rank, and what is written about hangs. On a store, other nodes have folders there."""
    checkpoints = _Entry("checkpoints")
    script_checkpoints = _Entry("script-checkpoints")
    """What a script of the user saves for itself, in whatever form."""
    spools = _Entry(".spools")
    """Where workers keep the points that the driver has not received yet, as long as the run lasts."""
    ranks_file = _Entry(".spools/ranks.json")
    """Which of these workers has which rank."""
    lease_file = _Entry("lease")
    """The driver touches it every few seconds, which shows other hosts that it lives."""
    fence_file = _Entry("fence")
    """The generation that may save."""
    stop_file = _Entry("stop")
    """A request to stop the run."""
    lock_file = _Entry(".lock")
    """Its lock is held by a process that changes the record."""
    reserve_file = _Entry(".reserve")
    """Space for the last records of the run, should the disk be full by then."""
    origin_file = _Entry(".origin")
    """The driver that writes the files here, of which those on a store are copies."""

    @property
    def url(self) -> str | None:
        """The URL of the run, if it is on a store."""
        return None if self.remote is None else self.remote.url

    @property
    def location(self) -> str:
        """Where the user finds the run."""
        return self.url or str(self.path)

    def location_of(self, path: Path) -> str:
        """Return where the user finds the file or directory ``path`` of the run."""
        return str(path if self.remote is None else self.remote.child(str(path.relative_to(self.path))))

    def holds(self, path: Path) -> bool:
        """Return whether ``path`` is in the directory, wherever links and ``..`` in it lead."""
        return path.resolve().is_relative_to(self.path.resolve())

    def sample_file(self, step: int, name: str, suffix: str) -> Path:
        return self.samples / f"step-{step:06d}-{name}.{suffix}"

    @property
    def remote_checkpoints(self) -> Remote | None:
        """The directory of the checkpoints on the store; None without a store."""
        return None if self.remote is None else self.remote.child(self.checkpoints.name)

    def stacks_file(self, generation: int) -> Path:
        """The file with the stacks of all ranks from when one of this generation hung."""
        return self.logs / f"stacks-generation-{generation}.txt"

    def flight_file(self, generation: int, rank: int) -> Path:
        """The dump of torch's flight recorder on one rank, from when one of this generation hung."""
        return self.logs / f"flight-generation-{generation}-rank-{rank}.json"

    def spool(self, node_id: str, pid: int) -> Path:
        return self.spools / f"{node_id}-{pid}"

    def log_file(self, rank: int) -> Path:
        return self.logs / f"rank-{rank}.log"

    def is_original(self, driver: Mapping[str, Any]) -> bool:
        """Return whether ``driver`` has written the files here; otherwise they are copies of those on a store."""
        try:
            return bool(driver) and read_json(self.origin_file) == driver
        except ValueError:
            return False

    def reserve_space(self) -> None:
        """Take the space for the last records of the run.

        Raises:
            OSError: there is not so much space.
        """
        # Random, because a file system may compress zeros to nothing.
        self.reserve_file.write_bytes(os.urandom(_RESERVE_BYTES))

    def release_space(self) -> None:
        """Free what :meth:`reserve_space` has taken."""
        with contextlib.suppress(OSError):
            self.reserve_file.unlink(missing_ok=True)

    def driver_if_running(self) -> dict[str, Any] | None:
        """Return the process that drives the run, None if none does.

        For a driver on another host or in another container, the lease decides.

        Raises:
            ValueError: the record is damaged.
        """
        record = self.read_record()
        if record.get("state") not in ACTIVE_STATES:
            return None
        driver: dict[str, Any] = record.get("driver") or {}
        return driver if (is_alive(driver) if is_visible(driver) else self._lease_is_fresh()) else None

    def _lease_is_fresh(self) -> bool:
        """Whether the lease was renewed lately, by the clock that stamps the files."""
        try:
            now = now_on(self.path)
        except OSError:
            now = time.time()  # this process may not write there; its clock is the only one available
        return now - self.renewed_at() < LEASE_S

    def renewed_at(self) -> float:
        """Return when a driver last renewed its lease or wrote the record, by the clock that stamps the files.

        Raises:
            FileNotFoundError: there is no record.
        """
        renewed = changed_at(self.record_file)
        with contextlib.suppress(FileNotFoundError):
            renewed = max(renewed, changed_at(self.lease_file))
        return renewed

    def read_record(self) -> dict[str, Any]:
        """Return the contents of ``run.json``; empty if it does not exist.

        Raises:
            ValueError: the record is damaged; the message has its path.
            OSError: it cannot be read.
        """
        return read_json(self.record_file, _TYPES)

    def read_driver(self) -> dict[str, Any]:
        """Return the process that last drove the run; empty if the record names none. Raises as :meth:`read_record`."""
        return self.read_record().get("driver") or {}

    def update_record(self, **values: Any) -> None:
        """Set keys of ``run.json`` and keep the others. Raises as :meth:`edit_record`."""
        with self.edit_record() as record:
            record.update(values)

    def record_upload(self, mlflow_run_id: str | None) -> None:
        """Enter the id on the tracking server, also into the summary of a run that has ended.

        Raises as :meth:`edit_record`.
        """
        with self.edit_record() as record:
            record["mlflow_run_id"] = mlflow_run_id
            if record.get("summary"):
                record["summary"] = {**record["summary"], "mlflow_run_id": mlflow_run_id}

    @contextlib.contextmanager
    def edit_record(self) -> Iterator[dict[str, Any]]:
        """Yield the contents of ``run.json``, and write them back if the block changes them.

        Other processes that change the record wait meanwhile. The new contents are on the disk when the block ends.

        Raises:
            OSError: the record cannot be written, or another process keeps it locked.
            ValueError: the record is damaged.
        """
        with locked(self.lock_file):
            before, record = self.read_record(), self.read_record()
            yield record
            if record != before:
                write_json(self.record_file, record, durable=True)


def state_of(run_dir: RunDir) -> str:
    """Return the state in ``run.json``, or ``died`` for a run that has not ended and has no driver.

    Raises:
        ValueError: the record is damaged.
    """
    state = str(run_dir.read_record().get("state") or "-")
    return DIED if state in ACTIVE_STATES and run_dir.driver_if_running() is None else state


def create(output_dir: Path, name: str) -> RunDir:
    """Create an empty run directory below ``output_dir``.

    Raises:
        OSError: the directory cannot be created.
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
    raise OSError(f"no free name for a run directory: {day / stem} and its numbered variants exist")


def all_runs(output_dir: Path) -> Iterator[RunDir]:
    """Yield every run below ``output_dir``, the newest first."""
    folders = [folder for day in folders_in(output_dir) for folder in folders_in(day)]
    for folder in sorted(folders, key=lambda path: path.parts[-2:], reverse=True):
        run_dir = RunDir(folder.resolve())
        with contextlib.suppress(PermissionError):  # another user's
            if run_dir.record_file.is_file():
                yield run_dir


def split_checkpoint(text: str) -> tuple[str, str | None]:
    """Return the run that a user names, and the checkpoint of it; None if ``text`` names only a run."""
    named = _CHECKPOINT.fullmatch(text)
    return (text, None) if named is None else (named[1], named[2])


def request_stop(run_dir: RunDir, *, by: str) -> None:
    """Ask the driver that the record of a run names to stop, as SIGTERM would. No later driver of the run obeys.

    ``by``: the user who asks, and their host.

    Raises:
        OSError: the directory or the store cannot be written.
        ValueError: the record is damaged.
    """
    request = {"by": by, "started": run_dir.read_record().get("started")}
    if run_dir.remote is None:
        write_json(run_dir.stop_file, request)
    else:
        run_dir.remote.write(run_dir.stop_file.name, json.dumps(request).encode())


def stop_requested_by(run_dir: RunDir) -> str | None:
    """Return who has asked the driver that the record of a run names to stop, None if nobody has.

    Raises:
        OSError: the directory or the store cannot be read.
        ValueError: the request or the record is damaged.
    """
    try:
        local, remote = run_dir.stop_file, run_dir.remote
        text = local.read_bytes() if remote is None else remote.read(local.name)
    except FileNotFoundError:
        return None
    request = json.loads(text)
    return str(request["by"]) if request.get("started") == run_dir.read_record().get("started") else None

"""Where runs are looked for that a user names or lists: one output directory, or all that are known; namesakes; how far
a run is that has no summary yet, from the end of its journal.
"""

from __future__ import annotations

import contextlib
import difflib
import heapq
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.protocol.core_metrics import CORE_METRICS, SAMPLES_PER_S
from orchestrator.records.journal import OF_NO_ATTEMPT, read_points
from orchestrator.records.output_dir import OutputDir, find_run, name_of
from orchestrator.records.run_dir import LEASE_S, RunDir
from orchestrator.storage.remote import is_url

DEFAULT_OUTPUT_DIR = "outputs"
NEWEST = "last"
"""What a user types for the newest run."""
NEWEST_ELSEWHERE = ("latest", "newest", "recent")
"""What others call it."""
SUBMISSION_TAG = "submission"
"""The tag of a run with the id of the submitted job that has started it."""
_REMARK = re.compile(r" \((?:step \d+|pruned)\)")
"""What MLflow shows after the name and the settings of a run."""
_TIME = re.compile(r"^\d\d-\d\d-\d\d-")
"""What the directory of a run has before its name."""
_MLFLOW_ID = re.compile(r"(?:.*/runs/)?([0-9a-f]{32})(?:[?#/].*)?")
"""The id of a run in MLflow, or the address of its page."""
_ID_SUFFIX = re.compile(r"-\d{4}-\d{6}-[0-9a-f]{4}$")
"""What ``orchestrator submit`` adds to the name of a run."""


class NoSuchRunError(ValueError):
    """No run is named as the user has typed it."""


def in_job_id(text: str) -> str:
    """Return ``text`` with the characters that the id of a submitted job may have."""
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in text)


def submitted_base_dir() -> Path:
    """Return the directory that the paths of a submitted job start from; Ray deletes the job's working directory."""
    return Path("~/orchestrator").expanduser()


def search_options(output_dir: OutputDir) -> list[str]:
    """Return the options with which a verb looks for runs in ``output_dir``; none if it does so without them."""
    is_default = output_dir.remote is None and output_dir.path.resolve() == Path(DEFAULT_OUTPUT_DIR).resolve()
    return [] if is_default else ["--output-dir", str(output_dir)]


@dataclass(frozen=True)
class RunSearch:
    """The output directories in which runs are looked for, each once."""

    outputs: Sequence[OutputDir]

    @classmethod
    def of(cls, output_dir: str | None, known: Sequence[str] = ()) -> RunSearch:
        """Return the search in ``output_dir``, a path or URL.

        If it is None, the search is in ``outputs``, in the ``outputs`` of submitted jobs if there are any, and in the
        directories ``known`` from elsewhere.
        """
        if output_dir is not None:
            return cls((OutputDir.of(output_dir),))
        submitted = submitted_base_dir() / DEFAULT_OUTPUT_DIR
        outputs: dict[str, OutputDir] = {}
        for text in (DEFAULT_OUTPUT_DIR, *([str(submitted)] if submitted.is_dir() else []), *known):
            outputs.setdefault(text if is_url(text) else str(Path(text).resolve()), OutputDir.of(text))
        return cls(tuple(outputs.values()))

    def __str__(self) -> str:
        return " or ".join(map(str, self.outputs))

    def runs(self) -> Iterator[RunDir]:
        """Yield every run, the newest first, with its present record.

        Raises:
            StorageError: a store cannot be used.
        """
        return heapq.merge(*(output.runs() for output in self.outputs), key=lambda r: r.path.parts[-2:], reverse=True)

    def name_of(self, run_dir: RunDir) -> str:
        """Return ``<date>/<time>-<name>`` of a run in the first directory, and the location of another one."""
        is_first = OutputDir.containing(run_dir).path == self.outputs[0].path.resolve()
        return name_of(run_dir) if is_first else run_dir.location

    def look_up(self, text: str, *, trained: bool = False) -> RunDir:
        """Return the run that a user names, with its present record.

        Args:
            text: a path, a URL, or what :meth:`named` takes; or ``last`` for the newest run.
            trained: whether names and ``last`` pass over runs that leave no model.

        Raises:
            NoSuchRunError: there is no such run.
            StorageError: a store cannot be used.
        """
        if text == NEWEST:
            runs = (run for run in self.runs() if not trained or leaves_model(run.read_record()))
            found = next(runs, None)
        elif _MLFLOW_ID.fullmatch(text) or ((found := find_run(text)) is None and not is_url(text)):
            found = next(self.named(text, trained=trained), None)
        if found is None:
            if "/" not in text and next(self.runs(), None) is None:
                where = " or ".join(o.path.resolve().as_posix() if o.remote is None else str(o) for o in self.outputs)
                there = "go to the directory where they were started, or give their --output-dir"
                raise NoSuchRunError(f"{text}: there are no runs in {where}; {there}")
            newest = f"; {NEWEST} is the newest one" if text.lower() in NEWEST_ELSEWHERE else ""
            near = self._nearest(text)
            raise NoSuchRunError(f"{text}: no such run in {self}; {near}`orchestrator runs` lists them{newest}")
        return found

    def _nearest(self, text: str) -> str:
        """Return which names of runs are close to ``text``, as the beginning of a remedy; empty if none is."""
        names = {_TIME.sub("", name.rpartition("/")[2]): None for output in self.outputs for name in output.names()}
        close = difflib.get_close_matches(text.rpartition("/")[2], names, n=3)
        return f"did you mean {' or '.join(close)}? " if close else ""

    def named(self, text: str, *, trained: bool = False) -> Iterator[RunDir]:
        """Yield the runs that ``text`` means, the newest first, each with its present record.

        Args:
            text: ``<date>/<time>-<name>`` or ``<time>-<name>``; otherwise, if no directory is called so, the name of
                runs, also with their settings as in MLflow, or the settings alone, such as ``lr=0.1``; the id of the
                submitted job that has started them; or the id in MLflow, or the address of its page.
            trained: whether names pass over runs that leave no model.

        Raises:
            StorageError: a store cannot be used.
        """
        newest_first = sorted(((n, o) for o in self.outputs for n in o.names()), key=lambda n: n[0], reverse=True)
        exact = [(name, output) for name, output in newest_first if text in (name, name.partition("/")[2])]
        text = _REMARK.sub("", text)
        if (given := _MLFLOW_ID.fullmatch(text)) is not None:
            text = given[1]
        first, _, _ = text.partition(" ")
        parts = [""] if "=" in first or given else [f"-{in_job_id(_ID_SUFFIX.sub('', word))}" for word in (text, first)]
        for directory, output in exact or [n for n in newest_first if any(part in in_job_id(n[0]) for part in parts)]:
            if (run := output.find(directory)) is not None and (exact or _is_called(run, text, trained=trained)):
                yield run


def _is_called(run_dir: RunDir, text: str, *, trained: bool) -> bool:
    try:
        record = run_dir.read_record()
    except (OSError, ValueError):  # an unreadable run is left alone
        return False
    name, settings = record.get("name"), (record.get("sweep") or record).get("settings")
    called = [name, record.get("tags", {}).get(SUBMISSION_TAG), record.get("mlflow_run_id")]
    called += [settings, f"{name} {settings}"] if settings else []
    return text in called and (not trained or leaves_model(record))


def leaves_model(record: Mapping[str, Any]) -> bool:
    """Return whether a run has not only evaluated another, or looked for a learning rate."""
    return not record.get("evaluated") and (record.get("params") or {}).get("train.lr_range") is None


def active_namesakes(run_dir: RunDir) -> Mapping[str, str]:
    """Return the locations of the other active runs of this name in the same local ``output_dir``, by their uids.

    Runs of the same sweep are left out, which share a name. Only records of runs whose lease is fresh are read, because
    a directory may have thousands of runs of one name. On a store, even that would take too long.
    """
    if run_dir.remote is not None:
        return {}
    record, now = run_dir.read_record(), run_dir.renewed_at()  # this run has just been recorded
    found = {}
    for other in OutputDir.containing(run_dir).runs():
        if other == run_dir or str(record["name"]) not in other.path.name:
            continue
        with contextlib.suppress(OSError, ValueError):  # an unreadable run is left alone
            if now - other.renewed_at() > LEASE_S:
                continue
            there = other.read_record()
            same_sweep = record.get("sweep") is not None and _sweep_id(record) == _sweep_id(there)
            if there.get("name") == record["name"] and not same_sweep and other.driver_if_running() is not None:
                found[str(there.get("uid"))] = other.location
    return found


def namesake_warning(name: str, location: str) -> str:
    """Return what the user of a run should know about another one of its name, at ``location``."""
    return (
        f"another run named {name} has not ended: {location}; name=... tells them apart, and `orchestrator stop "
        f"{shlex.quote(location)}` ends the other one"
    )


def _sweep_id(record: Mapping[str, Any]) -> str | None:
    return (record.get("sweep") or {}).get("id")


_TAIL_BYTES = 2**18
"""More than several points and readings of a large run, and little to read over a network."""


def progress_of(run_dir: RunDir) -> dict[str, float]:
    """Return what the summary of the run would contain now: ``steps``, the last losses, and the speed at the last step.

    It is empty if the run has logged nothing, or if its journal cannot be read. Only the end of the journal is read.
    """
    step, latest = 0, dict[str, float]()
    for at, _, metrics, _ in read_points(_tail(run_dir)):  # the first line may be incomplete
        if any(not name.startswith(OF_NO_ATTEMPT) for name in metrics):
            step = max(step, at)
            latest |= metrics
    found: dict[str, Any] = {"steps": step} if step else {}
    for spec in CORE_METRICS:
        for summary in spec.summaries:
            if spec.name in latest and (summary.derive == "last" or spec is SAMPLES_PER_S):
                found[summary.key] = latest[spec.name]
    return found


def _tail(run_dir: RunDir) -> bytes:
    file = run_dir.metrics_file
    try:
        if run_dir.remote is not None and not run_dir.is_original(run_dir.read_driver()):
            return run_dir.remote.read(file.name, last_bytes=_TAIL_BYTES)
        with file.open("rb") as journal:
            journal.seek(max(0, file.stat().st_size - _TAIL_BYTES))
            return journal.read()
    except (OSError, ValueError):  # ValueError: the record is damaged
        return b""

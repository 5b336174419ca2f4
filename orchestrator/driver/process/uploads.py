"""The door of tracking: what uploads a run while it trains, and afterwards.

The feature that does so answers with two modules: ``uploads`` is a :class:`Tracking`, and ``tracking_keys`` a
:class:`TrackingKeys`. Without them, nothing is uploaded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, cast

from orchestrator import features
from orchestrator.config.operation import TrackingConfig
from orchestrator.driver.process.origin import Origin
from orchestrator.protocol.node_report import Finding
from orchestrator.records.output_dir import OutputDir
from orchestrator.records.run_dir import RunDir


@dataclass(frozen=True, kw_only=True)
class Upload:
    """What the tracking server has of a run.

    Attributes:
        page: the address of the page that compares it with others; None if there is none.
        uploaded: how many values of metrics the server has.
        missing: how many values it lacks.
        complete: whether the server has every value, the final status and the artifacts.
        in_progress: a process goes on with the upload.
        error: why the last attempt failed; None if it did not.
    """

    run_id: str | None = None
    page: str | None = None
    uploaded: int = 0
    missing: int = 0
    complete: bool = True
    in_progress: bool = False
    error: str | None = None


class Uploader(Protocol):
    """What uploads one run."""

    def problem(self) -> str | None:
        """Return why the last upload failed, None if it succeeded. Reads one small file."""

    def sink_problem(self) -> str | None:
        """Return which sinks have failed at the last attempt, and why; None if none has."""

    def page(self) -> str | None:
        """Return the address of the page that compares the run with others; None as long as there is none."""

    def run_id(self) -> str | None:
        """Return the id of the run on the server; None as long as there is none. Reads one small file."""

    def finish(self, timeout_s: float) -> Upload:
        """Wait up to ``timeout_s`` until everything is uploaded; the upload then goes on by itself.

        The journal must contain the run's ``RunEnded``.
        """

    def leave(self) -> Upload:
        """Let the upload finish on its own; return the present state."""


class Tracking(Protocol):
    """What uploads runs."""

    def start(
        self, run_dir: RunDir, tracking: TrackingConfig, secrets: Sequence[str] = (), *, shared: bool = False
    ) -> Uploader:
        """Begin to upload a run. ``run.json`` must exist, and ``tracking.uri`` must be valid and absolute.

        Args:
            secrets: texts to mask in what is uploaded.
            shared: whether a script, too, logs to the run on the server.
        """

    def resume(
        self, output_dir: OutputDir, *, resumed: Collection[RunDir] = (), killed: Collection[RunDir] = ()
    ) -> None:
        """Upload in the background what a server lacks of the runs that have ended, but for those to be ``resumed``.

        ``killed``: runs of which was recorded just now that they have ended. Does not wait for anything.
        """

    def report_sweep(self, run_dir: RunDir, tracking: TrackingConfig, secrets: Sequence[str] = ()) -> None:
        """Upload the report of the sweep whose last run is ``run_dir``, in the background. Does not wait for anything.

        ``secrets``: texts to mask in what is uploaded.

        Raises:
            ValueError: the record of the run is damaged.
        """


class TrackingKeys(Protocol):
    """What the keys of tracking mean."""

    def absolute(self, tracking: TrackingConfig, base: Path) -> TrackingConfig:
        """Return the keys with absolute paths, which start from ``base``."""

    def errors(self, tracking: TrackingConfig, base: Path) -> list[str]:
        """Return what is wrong with the keys, whose paths are absolute."""

    def variables(self, tracking: TrackingConfig, base: Path) -> Mapping[str, str]:
        """Return the environment variables whose values the keys have; masked."""

    def notes(self, tracking: TrackingConfig, base: Path) -> list[str]:
        """Return remarks on what the environment decides about the keys, and on what it does not decide."""

    def findings(self, tracking: TrackingConfig) -> Iterator[Finding]:
        """Yield whether the server answers."""

    def sync_commands(self, run_dir: RunDir) -> list[str]:
        """Return the commands that upload what was kept here on purpose."""

    def page_commands(self, tracking: TrackingConfig, origin: Origin) -> list[str]:
        """Return the command that serves the page of the run; none if a server does."""

    def event_file_commands(self, run_dir: RunDir, origin: Origin) -> list[str]:
        """Return the command that shows the event files of a run and its neighbours; none without such files."""


class _Nothing:
    """Uploads nothing."""

    def start(self, *_: object, **__: object) -> Uploader:
        return self

    def problem(self) -> str | None:
        return None

    sink_problem = page = run_id = problem

    def leave(self) -> Upload:
        return Upload()

    def finish(self, timeout_s: float) -> Upload:
        return Upload()

    def resume(self, *_: object, **__: object) -> None:
        pass

    report_sweep = resume

    def absolute(self, tracking: TrackingConfig, base: Path) -> TrackingConfig:
        return replace(tracking, uri=None, tensorboard=False, sinks=())

    def errors(self, *_: object, **__: object) -> list[str]:
        return []

    notes = sync_commands = page_commands = event_file_commands = errors

    def variables(self, *_: object, **__: object) -> Mapping[str, str]:
        return {}

    def findings(self, tracking: TrackingConfig) -> Iterator[Finding]:
        yield from ()


def tracking() -> Tracking:
    """Return what uploads runs."""
    for found in features.modules("uploads"):
        return cast(Tracking, found)
    return _Nothing()


def tracking_keys() -> TrackingKeys:
    """Return what knows the keys of tracking."""
    for found in features.modules("tracking_keys"):
        return cast(TrackingKeys, found)
    return _Nothing()


def unmet_keys(given: Mapping[str, object]) -> list[str]:
    """Return an error if a command line asks for uploads, and nothing uploads."""
    if features.paths("uploads.py"):
        return []
    asking = ("tracking.uri", "tracking.sinks", "tracking.tensorboard")
    return [f"{key}: this installation uploads nothing; leave it out" for key in asking if given.get(key)]

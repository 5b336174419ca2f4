"""Where runs are looked for that a user names or lists: one output directory, or all that are known."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.records.output_dir import OutputDir, find_run, name_of
from orchestrator.records.run_dir import RunDir
from orchestrator.storage.remote import is_url

DEFAULT_OUTPUT_DIR = "outputs"
NEWEST = "last"
"""What a user types for the newest run."""


class NoSuchRunError(ValueError):
    """No run is named as the user has typed it."""


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
            text: a path, a URL, ``<date>/<time>-<name>`` or ``<time>-<name>`` below one of the directories, or ``last``
                for the newest run there.
            trained: whether ``last`` passes over runs that have only evaluated another.

        Raises:
            NoSuchRunError: there is no such run.
            StorageError: a store cannot be used.
        """
        if text == NEWEST:
            runs = (run for run in self.runs() if not (trained and run.read_record().get("evaluated")))
            found = next(runs, None)
        elif (found := find_run(text)) is None and not is_url(text):
            names = [(name, output) for output in self.outputs for name in output.names()]
            named = [(n, output) for n, output in names if text in (n, n.partition("/")[2])]
            newest_first = sorted(named, key=lambda found: found[0], reverse=True)
            found = next(filter(None, (output.find(name) for name, output in newest_first)), None)
        if found is None:
            raise NoSuchRunError(f"{text}: no such run in {self}; `orchestrator runs` lists them")
        return found

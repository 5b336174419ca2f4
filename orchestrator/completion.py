"""What tab completion offers for a command line: keys, names, fields of a job, and runs. Without torch and Ray."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Sequence

from orchestrator.config.build import ConfigError
from orchestrator.records.run_search import NEWEST, RunSearch
from orchestrator.storage.remote import is_url

_NAMES_OF_RUNS = {"resume": ("auto", "never", NEWEST), "start_from": (NEWEST,), "evaluate": (NEWEST,)}
"""The keys that name a run, with the words that do."""
_MOST_RUNS = 50


def of_launch(words: Sequence[str], prefix: str) -> set[str]:
    """Return what may replace ``prefix`` after the complete ``words``, which are overrides and the options of files."""
    from orchestrator.config.compose import shell_completion  # imports Hydra
    from orchestrator.config.overrides import choosing, values

    key, equals, _ = prefix.partition("=")
    if equals and key in _NAMES_OF_RUNS:
        given = values(words).get("output_dir")
        runs = _runs(None if given is None else str(given))
        return _beginning(prefix, (f"{key}={name}" for name in itertools.chain(_NAMES_OF_RUNS[key], runs)))
    answer = io.StringIO()
    program = os.environ["COMP_LINE"].split(maxsplit=1)[0]
    # Hydra answers nothing if a word is none of its own, such as the class of a job.
    chosen = [word for word in choosing(words) if not word.startswith("-")]
    os.environ["COMP_LINE"] = " ".join([program, *chosen, prefix])
    with contextlib.redirect_stdout(answer):
        shell_completion(words)
    fields = _fields(words) if prefix.startswith("job.") else ()
    offered = {word for word in answer.getvalue().split() if not word.startswith("mesh=")}  # what presets begin with
    return {*offered, *_beginning(prefix, (f"job.{name}=" for name in fields))}


def of_run(words: Sequence[str], prefix: str) -> set[str]:
    """Return the runs whose name or directory begins with ``prefix``, for a verb with the complete ``words``."""
    given = dict(itertools.pairwise(words)).get("--output-dir")
    return set() if prefix.startswith("-") else _beginning(prefix, [NEWEST, *_runs(given)])


def _beginning(prefix: str, offers: Iterable[str]) -> set[str]:
    return {offer for offer in offers if offer.startswith(prefix) and not re.search(r"\s", offer)}


def _runs(output_dir: str | None) -> Iterator[str]:
    """Yield the names and the directories of the newest runs on this machine."""
    if output_dir is not None and is_url(output_dir):
        return
    for run_dir in itertools.islice(RunSearch.of(output_dir).runs(), _MOST_RUNS):
        directory = run_dir.path.name
        yield directory
        yield re.sub(r"^\d\d-\d\d-\d\d-", "", directory)


def _fields(words: Sequence[str]) -> Iterable[str]:
    """Return the fields of the job that ``words`` choose."""
    from orchestrator.config.compose import composed_data
    from orchestrator.config.job_source import fields_in_source
    from orchestrator.config.overrides import choosing

    with contextlib.suppress(ConfigError, KeyError):
        target = composed_data(choosing(words, "job."))["job"]["_target_"]
        return fields_in_source(str(target)) or ()
    return ()

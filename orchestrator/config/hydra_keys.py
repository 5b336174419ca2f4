"""Hydra's command line: what it shows, and what has no effect here, with what takes its place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

KINDS = ("job", "hydra", "all")
"""What ``--cfg`` may show."""
INFO_TOPICS: Mapping[str, Sequence[str]] = {
    "all": ("plugins", "searchpath", "defaults-tree", "defaults"),
    "config": ("searchpath", "defaults-tree", "defaults"),
    **{topic: (topic,) for topic in ("defaults", "defaults-tree", "plugins", "searchpath")},
}
"""What Hydra prints for each word after ``--info``."""
INFO_WITH_CONFIG = ("all", "config")
"""The words after ``--info`` for which the configuration follows."""
_INSTEAD: Mapping[str, str] = {
    "hydra.run": "set output_dir and name, which name the directory of a run",
    "hydra.sweep": "set output_dir and name, which name the directories of the runs",
    "hydra.sweeper.params": "type the key itself with -m, as in -m job.lr=0.1,0.2",
    "hydra.sweeper": "list values with -m, and set sweep.trials=20 to search them with Optuna",
    "hydra.launcher": "set sweep.parallel to have several runs at once, which Ray starts",
    "hydra.mode": "type -m for several runs",
    "hydra.verbose": "read what the ranks write with `orchestrator logs RUN`",
    "hydra.job.name": "set name",
    "hydra.job.env_set": "set cluster.env.<NAME>",
    "hydra.job.env_copy": "set cluster.env.<NAME>=null",
    "hydra.job.chdir": "remove it, because a job runs in the directory of the command",
    "hydra.searchpath": "give the directory with --config-dir",
}
"""By the beginning of the key."""

OPTIONS: Mapping[str, str] = {
    "--config-path": "give the directory with --config-dir",
    "--experimental-rerun": "continue a run with resume=<run directory>",
    "--hydra-help": "the keys of Hydra have no effect; --help has those that have",
}
"""Options of Hydra's command line, by name."""

HONOURED = ("hydra.sweeper.params", "hydra.searchpath")
"""Keys that a file may set."""
_DEFAULT_CHOICES = (None, "default", "basic")


def instead_of(key: str) -> str:
    """Return the error for a key such as ``hydra.run.dir`` or ``hydra/launcher``."""
    dotted = key.replace("/", ".")
    instead = next((text for start, text in _INSTEAD.items() if f"{dotted}.".startswith(f"{start}.")), None)
    return f"{key}: has no effect here; {instead or 'remove it'}"


def file_errors(section: Any) -> Iterator[str]:
    """Yield an error for each key in the ``section`` hydra of a file that cannot be honoured."""
    for key in _keys(section, "hydra"):
        if not f"{key}.".startswith(tuple(f"{honoured}." for honoured in HONOURED)):
            yield instead_of(key)


def choice_errors(chosen: Mapping[str, Any]) -> Iterator[str]:
    """Yield an error for each of Hydra's own groups in which the files choose another name than Hydra's default."""
    for group, name in chosen.items():
        if str(group).startswith("hydra/") and name not in _DEFAULT_CHOICES:
            yield instead_of(str(group))


def _keys(data: Any, prefix: str) -> Iterator[str]:
    if isinstance(data, Mapping) and data and prefix not in HONOURED:
        for key, value in data.items():
            yield from _keys(value, f"{prefix}.{key}")
    elif data is not None:
        yield prefix

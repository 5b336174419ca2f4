"""The files that a command composes: those that ship, in ``conf/`` and in that of a feature, and those of the user."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from orchestrator import features
from orchestrator.config.text import did_you_mean

GROUPS = ("strategy", "job", "cluster", "tracking", "experiment")
PRIMARY = "config"
"""The file that composition begins with, unless ``--config-name`` names another one."""
DIR_OPTION, NAME_OPTION = "--config-dir", "--config-name"
DEFAULT_DIR = "conf"
"""The directory of the user, if there is one, unless ``--config-dir`` names another one."""


@functools.cache
def conf_dir() -> Path:
    """Return ``conf/`` of the checkout, or the copy inside the installed package."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "conf"
    return installed if installed.is_dir() else package.parent / "conf"


@functools.cache
def shipped_dirs() -> tuple[Path, ...]:
    """Return ``conf/``, and what is to be found beside it: the directories of the features."""
    return (conf_dir(), *features.paths("conf"))


def there(look: Callable[[], bool]) -> bool:
    """Return what ``look`` finds, as ``path.is_dir`` does; False for a path that cannot be looked for."""
    try:
        return look()
    except (OSError, ValueError):  # too long, or a character that no name has
        return False


@dataclass(frozen=True, kw_only=True)
class Files:
    """Where the files of a command are.

    Attributes:
        own: the directory of the user, which Hydra searches after ours; None without one.
        name: the file that composition begins with, without ``.yaml``.
    """

    own: Path | None = None
    name: str = PRIMARY

    @classmethod
    def of(cls, words: Iterable[str]) -> Files:
        """Return the files that the options among ``words`` choose; without any, the user's are in ``conf/``."""
        given = dict(word.split("=", 1) for word in words if is_option(word))
        own = Path(given.get(DIR_OPTION, DEFAULT_DIR)).expanduser().absolute()
        without = DIR_OPTION not in given and not there(own.is_dir)
        return cls(
            own=None if without or own.resolve() == conf_dir() else own,
            name=given.get(NAME_OPTION, PRIMARY).removesuffix(".yaml"),
        )

    @property
    def directories(self) -> list[Path]:
        """Where files are looked for, in this order."""
        return [*shipped_dirs(), *([] if self.own is None else [self.own])]

    def error(self) -> str | None:
        """Return what is wrong with the options; None if nothing is."""
        if self.own is not None and not there(self.own.is_dir):
            return f"{DIR_OPTION}={self.own}: no such directory"
        if self.find("", self.name) is None:
            return f"{NAME_OPTION}={self.name}: no such file; {did_you_mean(self.name, self.choices(''))}"
        return None

    def choices(self, group: str) -> list[str]:
        """Return the valid names of a group: one per file in its directories."""
        return sorted({path.stem for directory in self.directories for path in (directory / group).glob("*.yaml")})

    def find(self, group: str, name: str) -> Path | None:
        """Return the file of a name of a group; None if there is none."""
        paths = (directory / group / f"{name}.yaml" for directory in self.directories)
        return next((path for path in paths if there(path.is_file)), None)

    def is_group(self, key: str) -> bool:
        """Return whether ``key`` is a group, and not a key with a value: a directory of ours or of the user."""
        own = self.own is not None and re.fullmatch(r"[\w/-]+", key) and there((self.own / key).is_dir)
        return key in GROUPS or bool(own)

    def may_set_any(self, given: Mapping[str, Any]) -> bool:
        """Return whether a file that the overrides ``given`` choose may set keys of any section.

        Those that ship do not, unless they are experiments.
        """
        names = {k: v if isinstance(v, list) else [v] for k, v in given.items() if self.is_group(k)}
        chosen = (self.find(group, str(name)) for group in names for name in names[group])
        return self.name != PRIMARY or "experiment" in names or any(path and self.is_own(path) for path in chosen)

    def is_own(self, path: Path) -> bool:
        """Return whether a file is in the directory of the user."""
        return self.own is not None and path.is_relative_to(self.own)

    def shadowed(self, read: Iterable[Path]) -> Iterator[tuple[Path, str]]:
        """Yield each file of the user in whose place one that ships was ``read``, and its name."""
        for path in read:
            shipped = next((directory for directory in shipped_dirs() if path.is_relative_to(directory)), None)
            if self.own is not None and shipped is not None:
                hidden = self.own / path.relative_to(shipped)
                if hidden.is_file():
                    yield hidden, path.stem

    def notes(self) -> list[str]:
        """Return what the user should know: a ``config.yaml`` of theirs, maybe of another program, is not read."""
        if self.own is None or not (self.own / f"{PRIMARY}.yaml").is_file():
            return []
        return [
            f"{self.own / PRIMARY}.yaml is not read, because the shipped configuration has this name; to use it, "
            f"rename it to mine.yaml, begin it with `defaults: [{PRIMARY}, _self_]`, and add {NAME_OPTION}=mine"
        ]


SHIPPED = Files()


def is_option(word: str) -> bool:
    """Return whether a word among overrides is an option that chooses files, as in ``--config-name=mine``."""
    return word.startswith((f"{DIR_OPTION}=", f"{NAME_OPTION}="))


def options_of(words: Sequence[str]) -> list[str]:
    """Return the options among ``words`` that choose files."""
    return [word for word in words if is_option(word)]


def choices(group: str, files: Files = SHIPPED) -> list[str]:
    """Return the valid names of a group; without ``files``, of those that ship."""
    return files.choices(group)


def summary(group: str, name: str, files: Files = SHIPPED) -> str:
    """Return the comment in the first lines of a file of a group; empty without one."""
    path = files.find(group, name)
    lines = [] if path is None else path.read_text(encoding="utf-8", errors="replace").splitlines()
    comments = (line.lstrip("# ") for line in lines[:2] if line.startswith("#"))
    return next((comment for comment in comments if not comment.startswith("@package")), "")


FIXED = "fixed"
"""The key under which the file of a preset has values that no command changes."""


@functools.cache
def _shipped(path: Path) -> Mapping[str, Any]:
    """Return what a file that ships sets, and the files that it names."""
    own = yaml.safe_load(path.read_text(encoding="utf-8"))
    parts = [own if n == "_self_" else _shipped(conf_dir() / f"{n[1:]}.yaml") for n in own.pop("defaults", ["_self_"])]
    return {key: value for part in parts for key, value in part.items()}


@functools.cache
def group_values(group: str, name: str) -> Mapping[str, Any]:
    """Return the keys that the file of a group that ships sets, with their values."""
    path = SHIPPED.find(group, name)
    assert path is not None, f"{group}={name}"
    values = _shipped(path)
    return {key: value for key, value in values.items() if key != FIXED}


def preset_values(name: str) -> Mapping[str, Any]:
    """Return the values of all keys of a mesh in a preset, of those that it does not open too."""
    neutral = {key: value for file in conf_dir().glob("mesh/*.yaml") for key, value in _shipped(file).items()}
    own = _shipped(conf_dir() / f"strategy/{name}.yaml")
    return {**neutral, **group_values("strategy", name), **own.get(FIXED, {})}


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

"""What a run takes along to a cluster, checked before anything is sent: directories, modules and requirements."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType

from orchestrator.compat.ray.code_packages import packaged_files
from orchestrator.config.build import ConfigError
from orchestrator.config.operation import ClusterConfig
from orchestrator.display.plain_text import count, size
from orchestrator.worker.process.pip_packages import InstallError, use

_LARGEST_FILES = 5
_INSTALLED = ("site-packages", "dist-packages")


def requirements(pip: str | Sequence[str]) -> list[str]:
    """Return the requirements that ``cluster.pip`` lists, or the contents of the file that it names.

    Raises:
        ConfigError: there is no such file.
    """
    if not isinstance(pip, str):
        return list(pip)
    try:
        lines = Path(pip).expanduser().read_text().splitlines()
    except OSError as e:
        raise ConfigError(
            [f"cluster.pip={pip}: cannot read this file of requirements ({e.strerror}); for a package, write [{pip}]"]
        ) from e
    return [text for line in lines if (text := line.strip()) and not text.startswith("#")]


def install(cluster: ClusterConfig) -> None:
    """Install ``cluster.pip`` on this machine, whose process loads the job as the workers do.

    Raises:
        ConfigError: pip has failed.
    """
    try:
        use(requirements(cluster.pip), timeout_s=cluster.start_timeout_s)
    except InstallError as e:
        raise ConfigError([str(e)]) from e


def module_paths(py_modules: Sequence[str]) -> list[Path]:
    """Return the absolute paths in ``cluster.py_modules``.

    Raises:
        ConfigError: some are neither directories nor Python files nor wheels.
    """
    paths = [Path(module).expanduser().resolve() for module in py_modules]
    wrong = [p for p in paths if not (p.is_dir() or (p.is_file() and p.suffix in (".py", ".whl")))]
    if wrong:
        raise ConfigError([f"cluster.py_modules={p}: expected a directory, a .py file or a wheel" for p in wrong])
    return paths


def size_errors(source: Path, *, what: str, limit: int) -> list[str]:
    """Return why a directory or a file cannot travel: what ``.rayignore`` leaves of it is too large.

    Args:
        source: the directory or the file.
        what: the beginning of the error.
        limit: the size in bytes that a package has to stay below.
    """
    files = sorted(packaged_files(source), key=lambda f: f[1], reverse=True)
    total = sum(n for _, n in files)
    if total < limit:
        return []
    largest = ", ".join(f"{path} ({size(n)})" for path, n in files[:_LARGEST_FILES])
    return [
        f"{what}: {size(total)} in {count(len(files), 'file')}, and Ray takes less than {size(limit)}; the largest: "
        f"{largest}. Name what the job does not need in .rayignore"
    ]


def loaded_files(directory: Path, modules: Iterable[ModuleType]) -> list[Path]:
    """Return the files below ``directory`` that ``modules`` were loaded from, without those of installed packages."""
    files = {Path(file) for module in modules if isinstance(file := vars(module).get("__file__"), str)}
    return sorted(f for f in files if f.is_relative_to(directory) and not set(_INSTALLED) & set(f.parts))


def ignored_errors(directory: Path, needed: Mapping[Path, str], py_modules: Sequence[str] = ()) -> list[str]:
    """Return which files and directories do not travel, because an ignore file names them or what is in them.

    Args:
        directory: travels, without what ``.gitignore`` and ``.rayignore`` name.
        needed: what needs each path.
        py_modules: ``cluster.py_modules``, which travel too.

    Raises:
        ConfigError: see :func:`module_paths`.
    """
    sources = [directory, *module_paths(py_modules)]
    travels = {(s if s.is_dir() else s.parent) / path for s in sources for path, _ in packaged_files(s)}
    travels |= {parent for path in travels for parent in path.parents}
    return [
        f"{what}: {path} does not travel to the cluster, because .gitignore, .rayignore or Ray itself leaves it out; "
        "take it out of these files, or set RAY_RUNTIME_ENV_IGNORE_GITIGNORE=1 if only .gitignore names it"
        for path, what in needed.items()
        if path not in travels
    ]


def module_size_errors(py_modules: Sequence[str], *, limit: int) -> list[str]:
    """Return which of ``cluster.py_modules`` cannot travel, as :func:`size_errors` does.

    Raises:
        ConfigError: see :func:`module_paths`.
    """
    return [e for p in module_paths(py_modules) for e in size_errors(p, what=f"cluster.py_modules={p}", limit=limit)]

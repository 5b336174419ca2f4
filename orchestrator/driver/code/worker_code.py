"""What Ray brings to each node for the workers of a run: code, packages, environment variables, and a pickled job."""

from __future__ import annotations

import contextlib
import hashlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import ray
import ray.cloudpickle as cloudpickle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.compat.ray.code_packages import PIN_S, make_package, max_package_bytes, upload_package
from orchestrator.config.arguments import GivenJob
from orchestrator.config.build import ConfigError
from orchestrator.config.operation import ClusterConfig
from orchestrator.config.overrides import quote_text
from orchestrator.driver.code import shipped_code
from orchestrator.driver.process.cluster import allowed_nodes
from orchestrator.driver.process.waiting import node_answers
from orchestrator.job import Job
from orchestrator.planning.plan import Node
from orchestrator.protocol.messages import Variables
from orchestrator.user_code.breakpoints import REFUSAL, VARIABLE
from orchestrator.worker.process import network


class WorkerCode:
    """What the workers of a run need on each node. Use as a context manager.

    The packages are kept here until the exit, because Ray drops them when no job refers to them.

    Attributes:
        working_dir: the directory that travels; None if the nodes have the code.
        pip: the requirements that each worker installs.
    """

    def __init__(self, *, working_dir: Path | None, py_modules: Sequence[Path], pip: Sequence[str]):
        self.working_dir = working_dir
        self.pip = tuple(pip)
        self._py_modules = py_modules
        self._packages = contextlib.ExitStack()
        self._directory: Path | None = None
        self._modules: list[Path] = []
        self._uploaded_at = -float(PIN_S)
        self._runtime_env: dict[str, Any] = {}

    def __enter__(self) -> WorkerCode:
        if self.working_dir is None and not self._py_modules:
            return self  # without a folder, which a driver that is killed would leave
        folder = Path(self._packages.enter_context(tempfile.TemporaryDirectory(prefix="orchestrator-code-")))
        if self.working_dir is not None:
            self._directory = make_package(self.working_dir, folder / "working_dir.zip")
        for number, module in enumerate(self._py_modules):
            is_wheel = module.suffix == ".whl"
            package = module if is_wheel else make_package(module, folder / f"{number}.zip", with_name=module.is_dir())
            self._modules.append(package)
        return self

    def __exit__(self, *_: object) -> None:
        self._packages.close()

    def runtime_env(self) -> dict[str, Any]:
        """Return the option ``runtime_env`` of an actor, and bring to the cluster what it may have dropped."""
        if time.monotonic() - self._uploaded_at > PIN_S / 2:
            self._runtime_env = {}
            if self._directory is not None:
                self._runtime_env["working_dir"] = upload_package(self._directory)
            if self._modules:
                self._runtime_env["py_modules"] = [upload_package(module) for module in self._modules]
            self._uploaded_at = time.monotonic()
        return self._runtime_env


def code_for_workers(cluster: ClusterConfig, nodes: Sequence[Node], scripts: Iterable[Path] = ()) -> WorkerCode:
    """Return what the workers of a run need on ``nodes``, which this process is connected to.

    ``scripts``: the files that they run in processes of their own.

    Raises:
        ConfigError: ``cluster.pip`` or ``cluster.py_modules`` names a file that does not exist, or what has to travel
            is too large.
    """
    py_modules, pip = shipped_code.module_paths(cluster.py_modules), shipped_code.requirements(cluster.pip)
    errors = shipped_code.module_size_errors(cluster.py_modules, limit=max_package_bytes())
    working_dir = Path.cwd()
    if lacking := _nodes_to_supply(working_dir, nodes, cluster, scripts):
        what = f"{working_dir} has to travel to {', '.join(lacking)} because the code of the job is there"
        errors += shipped_code.size_errors(working_dir, what=what, limit=max_package_bytes())
    if errors:
        raise ConfigError(errors)
    return WorkerCode(working_dir=working_dir if lacking else None, py_modules=py_modules, pip=pip)


class CodeCache:
    """The code of the workers of several runs: made once for all runs that need the same. Use as a context manager."""

    def __init__(self) -> None:
        self._codes: dict[tuple[Any, ...], WorkerCode] = {}
        self._made = contextlib.ExitStack()

    def __enter__(self) -> CodeCache:
        return self

    def __exit__(self, *_: object) -> None:
        self._made.close()

    def get(self, config: ClusterConfig, scripts: frozenset[Path] = frozenset()) -> WorkerCode:
        """Return what the workers of a run need on the present nodes. Raises like :func:`code_for_workers`."""
        nodes = allowed_nodes(config)
        key = (config.py_modules, config.pip, config.autoscaling, scripts, frozenset(node.node_id for node in nodes))
        if key not in self._codes:
            self._codes[key] = self._made.enter_context(code_for_workers(config, nodes, scripts))
        return self._codes[key]


def code_files(directory: Path, modules: Iterable[ModuleType]) -> dict[str, str]:
    """Return the hash of each file below ``directory`` that one of ``modules`` was loaded from, by its path.

    Installed packages are left out, also the ones of a virtual environment below ``directory``.
    """
    files = shipped_code.loaded_files(directory, modules)
    return {str(file): digest for file in files if (digest := _digest(file)) is not None}


def _nodes_to_supply(
    working_dir: Path, nodes: Sequence[Node], cluster: ClusterConfig, scripts: Iterable[Path]
) -> list[str]:
    """Return the names of the nodes that lack code of the driver; the nodes of an autoscaler are still to come."""
    context = ray.get_runtime_context()
    others = [node for node in nodes if node.node_id != context.get_node_id()]
    if not (others or cluster.autoscaling) or context.runtime_env.get("working_dir"):
        return []
    files = code_files(working_dir, list(sys.modules.values()))
    below = [path.resolve() for path in scripts if path.resolve().is_relative_to(working_dir)]
    files |= {str(path): digest for path in below if (digest := _digest(path)) is not None}
    if not files:
        return []
    lacking = sorted(node.name for node in _nodes_without(files, others, timeout_s=cluster.pending_timeout_s))
    return [*lacking, "the nodes that the autoscaler adds"] if cluster.autoscaling else lacking


def _nodes_without(files: Mapping[str, str], nodes: Sequence[Node], *, timeout_s: float) -> list[Node]:
    """Return the nodes that lack some of the files, or do not say so within ``timeout_s``."""
    pending: dict[Any, Node] = {}
    for node in nodes:
        on_node = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
        pending[_has_files.options(scheduling_strategy=on_node).remote(files)] = node
    answers = node_answers(pending, timeout_s, wanted="an answer")
    return [node for node in nodes if not answers.get(node)]


@ray.remote(num_cpus=0)
def _has_files(files: Mapping[str, str]) -> bool:
    return all(_digest(Path(path)) == digest for path, digest in files.items())


def _digest(file: Path) -> str | None:
    """The hash of a file; None if it cannot be read."""
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return None


@dataclass(frozen=True)
class PickledJob:
    """A job for processes that cannot import its class, or not build it from text.

    Attributes:
        data: in the format of cloudpickle, which includes the class if a notebook or a script defines it.
        display: the job as it stands in a call of ``orchestrator.run``.
    """

    data: bytes
    display: str


def job_override(given: GivenJob) -> str:
    """Return the override that records which class a run has trained."""
    cls = given if isinstance(given, type) else type(given)
    return f"job._target_={quote_text(f'{cls.__module__}.{cls.__qualname__}')}"


def pickle_job(given: GivenJob, job: Job, errors: list[str]) -> PickledJob | None:
    """Pickle ``job``, which is the instance ``given``, or was built from the class ``given``.

    Returns:
        None if something that the job refers to cannot be pickled; ``errors`` then says what.
    """
    name = type(job).__name__
    try:
        data = cloudpickle.dumps(job)
    except Exception as e:  # pickling calls code of any class that the job refers to
        errors.append(
            f"job {name}: cannot be sent to the workers: {type(e).__name__}: {' '.join(str(e).split())[:300]}; create "
            "such objects in a method of the job, or put the class into a module"
        )
        return None
    return PickledJob(data, name if isinstance(given, type) else f"{name}(...)")


def pickled_with_code(function: Callable[[], object]) -> bytes:
    """Return a function for another process, with the code that this one could not import."""
    data: bytes = cloudpickle.dumps(function)
    return data


FORWARDED_PREFIXES = (
    "FI_",
    "GLOO_",
    "HF_",
    "NCCL_",
    "OFI_NCCL_",
    "PYTORCH_",
    "TORCHINDUCTOR_",
    "TORCH_",
    "UCX_",
)
"""Variables of the driver with these prefixes need not be named in ``cluster.env``."""
OF_A_NODE = frozenset({network.GLOO})
"""Variables that each worker sets for its own node, where a value of the driver's may be wrong, unless it is named."""


def worker_variables(named: Mapping[str, str | None], own: Mapping[str, str]) -> Variables:
    """Return the variables for the workers.

    Args:
        named: ``cluster.env``: the value of each variable; None for the driver's own value.
        own: the environment of the driver.

    Raises:
        ConfigError: ``named`` has None for variables that are not in ``own``.
    """
    missing = [name for name, value in named.items() if value is None and name not in own]
    if missing:
        raise ConfigError(
            f"cluster.env.{name}=null: the variable {name} is not set in this process; export it, or give a value"
            for name in missing
        )
    return Variables(
        values={
            VARIABLE: own.get(VARIABLE, REFUSAL),  # in place of Ray's, which waits where nobody looks
            **{name: own[name] if value is None else value for name, value in named.items()},
        },
        defaults={
            name: value for name, value in own.items() if name.startswith(FORWARDED_PREFIXES) and name not in OF_A_NODE
        },
    )

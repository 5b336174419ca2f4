"""What a node is: versions, code, limits and devices.

The driver sends this module by value, so that it also runs on a node that lacks the orchestrator or has another version
of it. It therefore refers to nothing of ours, and imports what may be missing inside of its functions.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

GPU_TIMEOUT_S = 60.0
MEMORY_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
"""The files with the limit of a container and its use, in cgroups of version 2 and 1."""
_LIST_GPUS = ("nvidia-smi", "--query-gpu=uuid,memory.total,mig.mode.current", "--format=csv,noheader,nounits")
# In a process of its own, because a CUDA context stays as long as its process.
_PROBE_GPUS = """
import json, sys, torch
from orchestrator.worker.process.gpu import gpu_error
names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
print(json.dumps([names, gpu_error(sys.argv[1:][:len(names)])]))
"""


def node_facts(
    *,
    address: str = "",
    working_dir: str | None = None,
    import_paths: Sequence[str] = (),
    modules: Sequence[str] = (),
    output_dir: str | None = None,
    nonce: str | None = None,
    num_gpus: int = 0,
    try_gpus: bool = False,
) -> dict[str, Any]:
    """Return the facts of this machine and process, as the fields of a ``NodeReport``.

    Args:
        address: the IP address by which Ray knows this node.
        working_dir: the directory of the driver, from which the job is imported; None to stay.
        import_paths: the paths on which the driver finds modules.
        modules: the modules that a worker needs, to try to import them.
        output_dir: the directory with the runs; None if they are on a store.
        nonce: the name of a file that the driver has written into ``output_dir``; None to look for none.
        num_gpus: how many GPUs Ray manages here.
        try_gpus: whether to compute on each of them, which takes seconds.
    """
    if working_dir is not None and Path(working_dir).is_dir():
        os.chdir(working_dir)
    sys.path.extend(path for path in import_paths if path not in sys.path)
    gpus, gpu_error = _gpus(ray_gpus(num_gpus, os.environ)) if try_gpus else (None, None)
    max_open_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return {
        "name": socket.gethostname(),
        "address": address,
        "python": platform.python_version(),
        "ray": _version("ray"),
        "torch": _version("torch"),
        "orchestrator": _own_version(),
        "code": code_hash(),
        "import_error": next(filter(None, map(_import_error, modules)), None),
        "interface": _interface_of(address),
        "interface_of_user": os.environ.get("GLOO_SOCKET_IFNAME"),
        "shm_bytes": shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else None,
        "free_disk_bytes": None if output_dir is None else _free_disk_bytes(Path(output_dir)),
        "sees_output_dir": None if output_dir is None or nonce is None else (Path(output_dir) / nonce).exists(),
        "write_error": None if output_dir is None else _write_error(Path(output_dir)),
        "max_open_files": None if max_open_files == resource.RLIM_INFINITY else max_open_files,
        **memory(num_gpus),
        "gpus": gpus,
        "gpu_error": gpu_error,
    }


def memory(num_gpus: int, environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return the memory of this machine or container, and that of the smallest GPU of Ray, in bytes.

    Args:
        num_gpus: how many GPUs Ray manages here; without any, their memory is 0.
        environment: the variables with which Ray was started.
    """
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for limit, _ in MEMORY_FILES:
        with contextlib.suppress(OSError, ValueError):  # it is "max" without a limit
            sizes.append(int(Path(limit).read_text()))
    by_bus = environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    return {"memory_bytes": min(sizes), "gpu_memory_bytes": _smallest(ray_gpus(num_gpus, environment), by_bus=by_bus)}


def _smallest(ids: Sequence[str], *, by_bus: bool) -> int:
    """The memory of the smallest of these GPUs in bytes; 0 if one is unknown, such as a part of a GPU (MIG).

    nvidia-smi counts GPUs by their bus. CUDA begins with the fastest unless it counts ``by_bus`` too, so that a number
    may be another GPU: then this is the larger answer.
    """
    if not ids or shutil.which(_LIST_GPUS[0]) is None:
        return 0
    try:
        done = subprocess.run(_LIST_GPUS, capture_output=True, text=True, timeout=GPU_TIMEOUT_S, check=True)
        rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
        gpus = [(uuid, int(mib) * 2**20 if mib.isdigit() and mig != "Enabled" else 0) for uuid, mib, mig in rows]
    except (OSError, subprocess.SubprocessError, ValueError):
        return 0

    def size(name: str, ordered: Sequence[tuple[str, int]]) -> int:
        named = [size for number, (uuid, size) in enumerate(ordered) if name == str(number) or uuid.startswith(name)]
        return named[0] if len(named) == 1 else 0

    orders = [gpus] if by_bus else [gpus, sorted(gpus, key=lambda gpu: -gpu[1])]
    answers = [min(size(name.strip(), ordered) for name in ids) for ordered in orders]
    return max(answers) if all(answers) else 0


def wall_clock() -> float:
    """Return the seconds since the epoch by the clock of this machine."""
    return time.time()


def code_hash() -> str | None:
    """Return a hash of the sources of the orchestrator that this process would import; None if there is none."""
    spec = importlib.util.find_spec("orchestrator")
    if spec is None or not spec.submodule_search_locations:
        return None
    root = Path(spec.submodule_search_locations[0])
    digest = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:12]


def _version(package: str) -> str | None:
    """The version of a package, None if it cannot be imported. Without its metadata, as in a checkout: ``unknown``."""
    if importlib.util.find_spec(package) is None:
        return None
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _own_version() -> str | None:
    """Return the version of the orchestrator, whatever its distribution is called; None if it cannot be imported."""
    if importlib.util.find_spec("orchestrator") is None:
        return None
    return str(importlib.import_module("orchestrator.version").__version__)


def _import_error(module: str) -> str | None:
    try:
        importlib.import_module(module)
    except (Exception, SystemExit, KeyboardInterrupt) as e:  # the module may raise anything
        return f"{module} ({type(e).__name__}: {str(e).strip().partition(chr(10))[0]})"
    return None


def _interface_of(address: str) -> str | None:
    import psutil

    addresses = psutil.net_if_addrs().items()
    return next((name for name, entries in addresses if any(a.address == address for a in entries)), None)


def _free_disk_bytes(directory: Path) -> int | None:
    """The free space of the file system on which ``directory`` is or would be created."""
    try:
        existing = next(path for path in (directory, *directory.parents) if path.exists())
        return shutil.disk_usage(existing).free
    except OSError:
        return None


def _write_error(directory: Path) -> str | None:
    """Why this process cannot create a file in ``directory``, or where that would be created; None if it can."""
    try:
        existing = next(path for path in (directory, *directory.parents) if path.exists())
        with tempfile.NamedTemporaryFile(prefix=".probe-", dir=existing) as file:
            file.write(b"probe")
    except OSError as e:
        return e.strerror or str(e)
    return None


def ray_gpus(count: int, environment: Mapping[str, str]) -> list[str]:
    """Return the GPUs that Ray manages, as it numbers them: the first ones of those that the user has not hidden."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    return ([str(i) for i in range(count)] if visible is None else visible.split(","))[:count]


def _gpus(ids: Sequence[str]) -> tuple[list[str] | None, str | None]:
    """The names of the GPUs that torch sees, and why it cannot compute on one of ``ids``; None if it cannot be asked.

    Ray leaves CUDA_VISIBLE_DEVICES to a task without GPUs as it was where Ray was started.
    """
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", _PROBE_GPUS, *ids]
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=GPU_TIMEOUT_S, check=True)
        names, error = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return None, f"a computation did not end within {GPU_TIMEOUT_S:g} s"
    except (OSError, subprocess.SubprocessError, ValueError):
        return None, None
    return names, error


def kernel_oom_kills() -> int | None:
    """Return how many processes of this machine its kernel has killed for lack of memory, also within a cgroup's limit.

    None if the kernel has no such counter.
    """
    try:
        counters = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
        return int(counters["oom_kill"])
    except (OSError, KeyError, ValueError):
        return None

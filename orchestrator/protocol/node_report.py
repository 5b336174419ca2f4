"""What a node of the cluster says of itself before a worker starts there, and what a check has found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class _OfNode:
    """A node.

    Attributes:
        name: its host name.
        address: the IP address by which Ray knows it.
    """

    name: str
    address: str

    @property
    def place(self) -> str:
        """The node as shown to users: ``host (address)``."""
        return f"{self.name} ({self.address})"


@dataclass(frozen=True, kw_only=True)
class NodeReport(_OfNode):
    """The answer of a node.

    Attributes:
        python, ray, torch, orchestrator: the versions there; None for a package that is not installed.
        code: a hash of the sources of the orchestrator there; None without it.
        import_error: a module of the worker or the job that cannot be imported there, and why; None if all can.
        interface: the network interface that has ``address``; None if none has it.
        interface_of_user: the interface that the user has chosen for gloo; None without a choice.
        shm_bytes: the size of ``/dev/shm``; None if there is none.
        free_disk_bytes: the free space where runs are stored; None if that directory does not exist there.
        sees_output_dir: whether the file that the driver wrote into the directory of runs is there; None if not asked.
        write_error: why no file can be written to the directory of runs; None if one can, or if not asked.
        max_open_files: the hard limit of open files of a process; None without a limit.
        memory_bytes: the memory of the machine, or of its container.
        gpu_memory_bytes: the memory of its smallest GPU; 0 without a GPU, or if unknown.
        gpus: the names of the GPUs that torch sees; None if it was not asked.
        gpu_error: which of them torch cannot compute on, and why; None if it can compute on all.
    """

    python: str
    ray: str | None
    torch: str | None
    orchestrator: str | None
    code: str | None
    import_error: str | None = None
    interface: str | None = None
    interface_of_user: str | None = None
    shm_bytes: int | None = None
    free_disk_bytes: int | None = None
    sees_output_dir: bool | None = None
    write_error: str | None = None
    max_open_files: int | None = None
    memory_bytes: int = 0
    gpu_memory_bytes: int = 0
    gpus: Sequence[str] | None = None
    gpu_error: str | None = None


@dataclass(frozen=True, kw_only=True)
class NoReport(_OfNode):
    """A node that has not reported, and why."""

    reason: str


Level = Literal["ok", "warning", "fault"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one check.

    Attributes:
        check: what was checked, in one or two words.
        level: ``fault`` if a run would fail, ``warning`` if it may fail or be slow.
        text: what was found.
        remedy: what to do; empty if nothing is to be done.
        where: the nodes that it is about, as shown to users; empty for the driver or the whole cluster.
    """

    check: str
    level: Level
    text: str
    remedy: str = ""
    where: tuple[str, ...] = ()

"""Whether a node has what a run needs, and a cluster keeps strangers out, clocks equal and its network fast. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from orchestrator.policy.node_check import OPEN, START_WITH_TOKEN, check_sharing, finding_of
from orchestrator.protocol.node_report import Finding, Level, NodeReport

GIB = 2**30
MIN_SHM_BYTES = GIB
"""Data-loading processes and Ray's object store use shared memory."""
MIN_OPEN_FILES = 8192
"""Ray recommends as many; every worker holds several connections."""
MIN_DISK_BYTES, FEW_DISK_BYTES = GIB, 10 * GIB
"""Below the first, a run would probably fail."""
MAX_CLOCK_OFFSET_S = 1.0
"""A larger one shifts the points of a run and the traces of its ranks."""
MIN_BANDWIDTH_MB_S = 10.0
MAX_LATENCY_MS = 10.0


@dataclass(frozen=True, kw_only=True)
class ClockOffset:
    """How far the clock of a node is ahead of the driver's, in seconds, and the largest error of that figure."""

    offset_s: float
    error_s: float


@dataclass(frozen=True, kw_only=True)
class AllReduce:
    """What an all-reduce costs: the time for 4 KiB, and the bandwidth of each process for 16 MiB.

    ``address`` is where the first process runs.
    """

    backend: str
    processes: int
    nodes: int
    address: str
    latency_ms: float
    bandwidth_mb_s: float


def check_limits(node: NodeReport) -> Iterator[Finding]:
    """Yield what the node has of shared memory, open files and free disk space."""
    if node.shm_bytes is None or node.shm_bytes < MIN_SHM_BYTES:
        remedy = "enlarge it (`docker run --shm-size=8g`, or an emptyDir with medium: Memory), or data.num_workers=0"
        yield finding_of(node, "/dev/shm", "warning", _gib(node.shm_bytes), remedy)
    else:
        yield finding_of(node, "/dev/shm", "ok", _gib(node.shm_bytes))
    if node.max_open_files is not None and node.max_open_files < MIN_OPEN_FILES:
        text, remedy = f"at most {node.max_open_files}", f"`ulimit -n {MIN_OPEN_FILES}` before `ray start`"
        yield finding_of(node, "open files", "warning", text, remedy)
    else:
        yield finding_of(
            node, "open files", "ok", "no limit" if node.max_open_files is None else str(node.max_open_files)
        )
    yield finding_of(node, "memory", "ok", _gib(node.memory_bytes))


def check_output_dir(node: NodeReport, output_dir: str) -> Iterator[Finding]:
    """Yield whether the directory of runs is the driver's, can be written and has room."""
    if faults := list(check_sharing(node, output_dir)):
        yield from faults
        return
    if node.free_disk_bytes is None:
        return
    level: Level = "fault" if node.free_disk_bytes < MIN_DISK_BYTES else "warning"
    remedy = "free some space, or choose another output_dir"
    if node.free_disk_bytes >= FEW_DISK_BYTES:
        level, remedy = "ok", ""
    yield finding_of(node, "output_dir", level, f"{output_dir}: {_gib(node.free_disk_bytes)} free", remedy)


def check_gpus(node: NodeReport, num_gpus: int) -> Iterator[Finding]:
    """Yield whether torch can use the GPUs of the node, of which Ray manages ``num_gpus``."""
    seen = node.gpus or ()
    if node.gpu_error is not None:
        remedy = "repair the GPU, or start Ray there without it (CUDA_VISIBLE_DEVICES)"
        yield finding_of(node, "GPUs", "fault", node.gpu_error, remedy)
    elif len(seen) < num_gpus:
        text = f"Ray manages {num_gpus}, torch sees {len(seen)}"
        remedy = "install a build of torch with CUDA and the driver, or start Ray there with --num-gpus=0"
        yield finding_of(node, "GPUs", "fault", text, remedy)
    elif len(seen) > num_gpus:
        text, remedy = f"Ray manages {num_gpus}, torch sees {len(seen)}", "start Ray there with more --num-gpus"
        yield finding_of(node, "GPUs", "warning", text, remedy)
    else:
        names = ", ".join(f"{seen.count(name)} x {name}" for name in dict.fromkeys(seen))
        yield finding_of(node, "GPUs", "ok", names or "none")


def check_interface(node: NodeReport) -> Iterator[Finding]:
    """Yield which network interface gloo and NCCL would use."""
    if node.interface_of_user is not None:
        yield finding_of(node, "interface", "ok", f"{node.interface_of_user} (GLOO_SOCKET_IFNAME)")
    elif node.interface is None:
        remedy = "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME before `ray start` there, or in cluster.env"
        yield finding_of(node, "interface", "fault", f"none has the address {node.address}", remedy)
    else:
        yield finding_of(node, "interface", "ok", node.interface)


def check_clock(where: str, clock: ClockOffset) -> Finding:
    """Return whether the clock of a node agrees with the driver's."""
    text = f"{1e3 * clock.offset_s:+.0f} ms from the driver's, within {1e3 * clock.error_s:.0f} ms"
    if abs(clock.offset_s) - clock.error_s <= MAX_CLOCK_OFFSET_S:
        return Finding(check="clock", level="ok", text=text, where=(where,))
    remedy = "set the clocks by NTP, for example with chrony"
    return Finding(check="clock", level="warning", text=text, remedy=remedy, where=(where,))


def check_network(measured: AllReduce) -> Finding:
    """Return whether an all-reduce is fast enough for training."""
    across = f"{measured.nodes} nodes" if measured.nodes > 1 else f"{measured.processes} processes of one node"
    text = (
        f"all-reduce across {across} with {measured.backend} ({measured.address}): "
        f"{measured.bandwidth_mb_s:,.0f} MB/s, {measured.latency_ms:.2g} ms for 4 KiB"
    )
    if measured.bandwidth_mb_s >= MIN_BANDWIDTH_MB_S and measured.latency_ms <= MAX_LATENCY_MS:
        return Finding(check="network", level="ok", text=text)
    remedy = "check the link and its other users, or choose another interface with GLOO_SOCKET_IFNAME"
    return Finding(check="network", level="warning", text=f"slow: {text}", remedy=remedy)


def _gib(size_bytes: int | None) -> str:
    return "none" if size_bytes is None else f"{size_bytes / GIB:.3g} GiB"


def check_token(*, required: bool, file: str | None) -> Finding:
    """Return whether strangers are kept out of a Ray that this process has joined.

    Args:
        required: whether the Ray asks for a token.
        file: the token file of this machine; None without one.
    """
    if required:
        return Finding(check="token", level="ok", text="this Ray asks for one, and this process presents it")
    text = f"this Ray asks for none: {OPEN}"
    if file is not None:
        text += f"; the next `ray start` here asks for the token in {file}, and nodes without it cannot join"
    return Finding(check="token", level="warning", text=text, remedy=START_WITH_TOKEN)

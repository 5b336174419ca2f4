"""Whether the nodes of a cluster can run workers, what is wrong with them, and who may use their Ray. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from orchestrator.config.text import first_few
from orchestrator.planning.plan import Node
from orchestrator.protocol.node_report import Finding, Level, NodeReport, NoReport

SUBMIT = "submit with `orchestrator submit --working-dir .`"
LEAVE_OUT = "leave it out with cluster.exclude_nodes"
_MAX_LISTED = 4
"""Nodes named in one message."""


def without_excluded(nodes: Sequence[Node], excluded: Sequence[str]) -> tuple[Node, ...]:
    """Return the nodes whose name and address are not in ``excluded``."""
    return tuple(n for n in nodes if n.name not in excluded and n.address not in excluded)


def node_errors(nodes: Sequence[NodeReport | NoReport], driver: NodeReport) -> list[str]:
    """Return why some nodes cannot run workers of this driver, one line for each reason; empty if all can."""
    return fault_lines(finding for node in nodes for finding in differences(node, driver))


def fault_lines(findings: Iterable[Finding]) -> list[str]:
    """Return one line for each fault among ``findings``: the nodes that have it, and the remedy."""
    return [_line(fault) for fault in grouped(f for f in findings if f.level == "fault")]


def grouped(findings: Iterable[Finding]) -> list[Finding]:
    """Return one finding for all nodes with the same finding, in the order of the first ones."""
    where: dict[Finding, tuple[str, ...]] = {}
    for finding in findings:
        same = replace(finding, where=())
        where[same] = (*where.get(same, ()), *finding.where)
    return [replace(finding, where=nodes) for finding, nodes in where.items()]


def differences(node: NodeReport | NoReport, driver: NodeReport) -> Iterator[Finding]:
    """Yield what the node lacks, or has in another version than the driver."""
    if isinstance(node, NoReport):
        found = [Finding(check="answer", level="fault", text=node.reason, remedy="see the load and Ray's logs there")]
    else:
        checks = (
            _python(node, driver),
            _package("Ray", node.ray, driver.ray),
            _package("torch", node.torch, driver.torch),
            _code(node, driver),
            _imports(node),
        )
        found = [fault for fault in checks if fault is not None]
    for fault in found:
        yield replace(fault, where=(node.place,))


def versions(node: NodeReport) -> str:
    """Return the versions of a node in one line."""
    code = "" if node.code is None else f" (code {node.code})"
    parts = [
        f"Python {node.python}",
        f"Ray {node.ray}",
        f"torch {node.torch}",
        f"orchestrator {node.orchestrator}{code}",
    ]
    return ", ".join(parts)


def _python(node: NodeReport, driver: NodeReport) -> Finding | None:
    if _minor(node.python) == _minor(driver.python):
        return None
    return _fault(f"Python {node.python}, and the driver has {driver.python}", "start Ray there with the same Python")


def _package(name: str, there: str | None, here: str | None) -> Finding | None:
    if there is None:
        return _fault(f"no {name}", f"install {name} {_public(here)} in the environment that Ray was started in there")
    # The part after + names a build, such as that for CPUs, which a driver without a GPU may have.
    if _public(there) == _public(here):
        return None
    return _fault(f"{name} {there}, and the driver has {here}", "install the same version there")


def _code(node: NodeReport, driver: NodeReport) -> Finding | None:
    if node.code == driver.code:
        return None
    if node.code is None:
        return _fault("no orchestrator", f"install it there, or {SUBMIT}")
    text = f"other code of the orchestrator ({node.orchestrator}, {node.code}; the driver has {driver.code})"
    return _fault(text, f"install the same commit there, or {SUBMIT}")


def _imports(node: NodeReport) -> Finding | None:
    if node.import_error is None or node.code is None:
        return None
    return _fault(f"an import error in {node.import_error}", f"install what is missing there, or {SUBMIT}")


def _fault(text: str, remedy: str) -> Finding:
    return Finding(check="versions", level="fault", text=text, remedy=remedy)


def _line(fault: Finding) -> str:
    listed = first_few(fault.where, _MAX_LISTED)
    verb = "has" if len(fault.where) == 1 else "have"
    joint = {"answer": " ", "versions": f" {verb} "}.get(fault.check, f": {fault.check} ")
    return f"{listed}{joint}{fault.text}; {fault.remedy}, or {LEAVE_OUT}"


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]


def _public(version: str | None) -> str:
    return (version or "").partition("+")[0]


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
        yield _of(node, "/dev/shm", "warning", _gib(node.shm_bytes), remedy)
    else:
        yield _of(node, "/dev/shm", "ok", _gib(node.shm_bytes))
    if node.max_open_files is not None and node.max_open_files < MIN_OPEN_FILES:
        text, remedy = f"at most {node.max_open_files}", f"`ulimit -n {MIN_OPEN_FILES}` before `ray start`"
        yield _of(node, "open files", "warning", text, remedy)
    else:
        yield _of(node, "open files", "ok", "no limit" if node.max_open_files is None else str(node.max_open_files))
    yield _of(node, "memory", "ok", _gib(node.memory_bytes))


def check_sharing(node: NodeReport, output_dir: str) -> Iterator[Finding]:
    """Yield why workers on the node cannot write to the driver's directory of runs; nothing if they can."""
    if node.sees_output_dir is False:
        remedy = "use a directory that all nodes share, such as one on NFS, or a URL such as s3://bucket/runs"
        yield _of(node, "output_dir", "fault", f"{output_dir} is not the directory of the driver", remedy)
    elif node.write_error is not None:
        remedy = "let the user of Ray there write to it, or choose another output_dir"
        yield _of(node, "output_dir", "fault", f"{output_dir} cannot be written ({node.write_error})", remedy)


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
    yield _of(node, "output_dir", level, f"{output_dir}: {_gib(node.free_disk_bytes)} free", remedy)


def check_gpus(node: NodeReport, num_gpus: int) -> Iterator[Finding]:
    """Yield whether torch can use the GPUs of the node, of which Ray manages ``num_gpus``."""
    seen = node.gpus or ()
    if node.gpu_error is not None:
        remedy = "repair the GPU, or start Ray there without it (CUDA_VISIBLE_DEVICES)"
        yield _of(node, "GPUs", "fault", node.gpu_error, remedy)
    elif len(seen) < num_gpus:
        text = f"Ray manages {num_gpus}, torch sees {len(seen)}"
        remedy = "install a build of torch with CUDA and the driver, or start Ray there with --num-gpus=0"
        yield _of(node, "GPUs", "fault", text, remedy)
    elif len(seen) > num_gpus:
        text, remedy = f"Ray manages {num_gpus}, torch sees {len(seen)}", "start Ray there with more --num-gpus"
        yield _of(node, "GPUs", "warning", text, remedy)
    else:
        names = ", ".join(f"{seen.count(name)} x {name}" for name in dict.fromkeys(seen))
        yield _of(node, "GPUs", "ok", names or "none")


def check_interface(node: NodeReport) -> Iterator[Finding]:
    """Yield which network interface gloo and NCCL would use."""
    if node.interface_of_user is not None:
        yield _of(node, "interface", "ok", f"{node.interface_of_user} (GLOO_SOCKET_IFNAME)")
    elif node.interface is None:
        remedy = "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME before `ray start` there, or in cluster.env"
        yield _of(node, "interface", "fault", f"none has the address {node.address}", remedy)
    else:
        yield _of(node, "interface", "ok", node.interface)


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


def _of(node: NodeReport, check: str, level: Level, text: str, remedy: str = "") -> Finding:
    return Finding(check=check, level=level, text=text, remedy=remedy, where=(node.place,))


def _gib(size_bytes: int | None) -> str:
    return "none" if size_bytes is None else f"{size_bytes / GIB:.3g} GiB"


OPEN = "everybody who reaches its ports can run code on its nodes"
START_WITH_TOKEN = "start Ray with cluster/start.sh on all nodes"


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


def exposure_warning(gcs_address: str, *, required: bool) -> str | None:
    """Return a warning if a Ray on an address that other machines reach asks for no token; None if all is well.

    Args:
        gcs_address: ``host:port`` of its GCS server.
        required: whether it asks for a token.
    """
    host = gcs_address.rpartition(":")[0].strip("[]")
    if required or _is_loopback(host):
        return None
    return f"the Ray on {host} asks for no token: {OPEN}; {START_WITH_TOKEN}"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

"""Whether the nodes of a cluster can run workers, what is wrong with them, and who may use their Ray. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

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


def check_sharing(node: NodeReport, output_dir: str) -> Iterator[Finding]:
    """Yield why workers on the node cannot write to the driver's directory of runs; nothing if they can."""
    if node.sees_output_dir is False:
        remedy = "use a directory that all nodes share, such as one on NFS, or a URL such as s3://bucket/runs"
        yield finding_of(node, "output_dir", "fault", f"{output_dir} is not the directory of the driver", remedy)
    elif node.write_error is not None:
        remedy = "let the user of Ray there write to it, or choose another output_dir"
        yield finding_of(node, "output_dir", "fault", f"{output_dir} cannot be written ({node.write_error})", remedy)


def finding_of(node: NodeReport, check: str, level: Level, text: str, remedy: str = "") -> Finding:
    """Return what is found about one node."""
    return Finding(check=check, level=level, text=text, remedy=remedy, where=(node.place,))


OPEN = "everybody who reaches its ports can run code on its nodes"
START_WITH_TOKEN = "start Ray with cluster/start.sh on all nodes"


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

"""The checks of `orchestrator doctor`: this process, the tracking server, Ray, and every node of the cluster."""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import ray
import ray.exceptions

from orchestrator.compat.ray.connection import address_of_ray_start, gcs_of_raylets_here, probe_gcs, session_folder
from orchestrator.config.build import ConfigError
from orchestrator.config.job_loader import find_class
from orchestrator.config.schema import Config
from orchestrator.config.text import first_few
from orchestrator.driver.checked_runs import this_machine
from orchestrator.driver.code.worker_code import code_for_workers
from orchestrator.driver.nodes.node_reports import driver_report, node_reports
from orchestrator.driver.preflight.child_checks import plan_sizes
from orchestrator.driver.preflight.run_config import absolute_paths, output_errors
from orchestrator.driver.process import cluster
from orchestrator.driver.process.calls import GangError, describe_error
from orchestrator.driver.process.uploads import tracking_keys
from orchestrator.features.doctor import node_checks
from orchestrator.features.doctor.measurements import clock_offset, measure_all_reduce
from orchestrator.planning.capacity import cpus_for_data
from orchestrator.planning.plan import Node
from orchestrator.policy import node_check
from orchestrator.protocol.node_report import Finding, NodeReport, NoReport
from orchestrator.storage.remote import is_url

ALONE = "no cluster is named: this machine alone is checked, with a Ray embedded in this process"
NAME_A_CLUSTER = "for a cluster, add cluster=auto on one of its nodes, or --address http://HEAD:8265 elsewhere"
TOKEN_FILE = Path("~/.ray/auth_token")


def examine(config: Config) -> Iterator[Finding]:
    """Yield what the checks find, each as soon as it is known. Without a cluster, a Ray is embedded for them."""
    config = absolute_paths(config)
    yield Finding(check="versions", level="ok", text=node_check.versions(driver_report()), where=("this process",))
    for error in output_errors(config):
        yield Finding(check="output_dir", level="fault", text=error)
    yield from check_job(config)
    yield from tracking_keys().findings(config.tracking)
    yield from check_traces(ray_traces())
    address = cluster.target_address(config.cluster)
    if address is None:
        num_cpus = max(2, config.cluster.cpus_per_worker)
        with cluster.embedded(config.cluster, num_cpus=num_cpus, num_gpus=this_machine().gpus, num_processes=2):
            yield Finding(check="Ray", level="ok", text=ALONE, remedy=NAME_A_CLUSTER)
            yield from _token_of_next_start()
            yield from _nodes(config)
    elif unreachable := cluster.address_error(address):
        yield Finding(check="Ray", level="fault", text=unreachable, remedy="see cluster/README.md")
    else:
        yield from _cluster(config, address)


def _cluster(config: Config, address: str) -> Iterator[Finding]:
    try:
        with cluster.connected(address, metadata={"job_name": "orchestrator doctor"}):
            yield Finding(check="Ray", level="ok", text=f"connected to {ray.get_runtime_context().gcs_address}")
            yield node_checks.check_token(required=cluster.asks_for_token(), file=_token_file())
            yield from _nodes(config)
            yield from check_cpus_of_data(config, cluster.allowed_nodes(config.cluster))
    except ConfigError as e:
        yield Finding(check="Ray", level="fault", text=str(e), remedy="see cluster/README.md")


def check_job(config: Config) -> Iterator[Finding]:
    """Import the job, so that the check of the nodes knows its code. What ``cluster.pip`` installs may be missing."""
    if config.cluster.pip:
        return
    errors: list[str] = []
    if find_class(config.job.target, errors) is not None:
        yield Finding(check="job", level="ok", text=f"{config.job.target} can be imported", where=("this process",))
    yield from (Finding(check="job", level="fault", text=error) for error in errors)


def check_cpus_of_data(config: Config, nodes: tuple[Node, ...]) -> Iterator[Finding]:
    """Say which CPUs of a cluster tasks would have that read the data; nothing if it has no room for the workers."""
    if (sizes := plan_sizes(config, None, nodes, [], oversubscribe_cpus=False)) is not None:
        note, error = cpus_for_data(sizes.initial, nodes)
        remedy = "" if error is None else "with such data, lower strategy.num_workers or cluster.cpus_per_worker"
        text = f"if job.dataset returns a ray.data.Dataset, {note}"
        yield Finding(check="data", level="ok", text=text, remedy=remedy)


def _token_file() -> str | None:
    return str(TOKEN_FILE) if TOKEN_FILE.expanduser().exists() else None


def _token_of_next_start() -> Iterator[Finding]:
    if (file := _token_file()) is not None:
        text = f"{file} exists: `ray start --head` here asks every node and every user for it"
        yield Finding(
            check="token", level="ok", text=text, remedy="copy it to the other nodes, or start with cluster/start.sh"
        )


def _nodes(config: Config) -> Iterator[Finding]:
    """Yield the findings about the nodes on which workers may start, and about the network between them."""
    allowed = cluster.allowed_nodes(config.cluster)
    nodes = [node for node in allowed if node.cpus >= config.cluster.cpus_per_worker]
    timeout_s = config.cluster.rendezvous_timeout_s
    try:
        with code_for_workers(config.cluster, allowed) as code, _nonce(config) as nonce:
            reports = node_reports(
                nodes,
                timeout_s=timeout_s,
                key="cluster.rendezvous_timeout_s",
                job_modules=sorted(config.modules()),
                code=code,
                output_dir=None if is_url(config.output_dir) else config.output_dir,
                nonce=nonce,
                try_gpus=True,
            )
    except ConfigError as e:
        yield from (Finding(check="code", level="fault", text=error) for error in e.errors)
        return
    driver = driver_report()
    able: list[Node] = []
    findings: list[Finding] = []
    for node, report in zip(nodes, reports, strict=True):
        of_node = list(_node(node, report, driver, config.output_dir))
        if isinstance(report, NodeReport):
            of_node += _clock(node, report, timeout_s)
        findings += of_node
        able += [] if any(finding.level == "fault" for finding in of_node) else [node]
    yield from node_check.grouped(findings)
    yield from _network(able, timeout_s)


def _node(node: Node, report: NodeReport | NoReport, driver: NodeReport, output_dir: str) -> Iterator[Finding]:
    faults = list(node_check.differences(report, driver))
    yield from faults
    if isinstance(report, NoReport):
        return
    if not faults:
        yield Finding(check="versions", level="ok", text=node_check.versions(report), where=(report.place,))
    yield from node_checks.check_limits(report)
    yield from node_checks.check_output_dir(report, output_dir)
    yield from node_checks.check_gpus(report, node.gpus)
    yield from node_checks.check_interface(report)


def _clock(node: Node, report: NodeReport, timeout_s: float) -> Iterator[Finding]:
    with contextlib.suppress(ray.exceptions.RayError):  # the node has been lost, as the network check then says
        yield node_checks.check_clock(report.place, clock_offset(node, timeout_s=timeout_s))


def _network(nodes: Sequence[Node], timeout_s: float) -> Iterator[Finding]:
    if not nodes:
        text, remedy = "not measured, because no node can run workers", "correct the faults above"
        yield Finding(check="network", level="warning", text=text, remedy=remedy)
        return
    gpus = [node.gpus for node in nodes]
    # With gloo as long as a GPU is in use, because the measurement would wait for it.
    on_gpus = all(gpus) and sum(gpus) >= 2 and ray.available_resources().get("GPU", 0) >= sum(gpus)
    try:
        yield node_checks.check_network(measure_all_reduce(nodes, on_gpus=on_gpus, timeout_s=timeout_s))
    except GangError as e:
        yield _no_network(str(e))
    except ray.exceptions.RayError as e:
        yield _no_network(describe_error(e))


def _no_network(reason: str) -> Finding:
    remedy = "open all ports between the nodes, or choose another interface with GLOO_SOCKET_IFNAME"
    return Finding(check="network", level="fault", text=f"the all-reduce failed ({reason})", remedy=remedy)


@contextlib.contextmanager
def _nonce(config: Config) -> Iterator[str | None]:
    """The name of a file in the directory of runs, while the nodes look for it; None if there can be none."""
    directory = Path(config.output_dir)
    if is_url(config.output_dir):
        yield None
        return
    is_new = not directory.exists()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = tempfile.NamedTemporaryFile(prefix=".doctor-", dir=directory)  # noqa: SIM115 - the block below may raise
    except OSError:
        yield None
        return
    try:
        with file:
            yield Path(file.name).name
    finally:
        if is_new:
            with contextlib.suppress(OSError):  # a run has begun meanwhile
                directory.rmdir()


GCS_PORT, DASHBOARD_PORT = 6379, 8265
"""The default ports of a head."""
_CHECK = "old Rays"
_TIMEOUT_S = 10.0
_SESSION = re.compile(r"session_\d{4}-[\w.-]+")


@dataclass(frozen=True, kw_only=True)
class RayTraces:
    """What is left of Rays on this machine.

    Attributes:
        folder: the directory of Ray's sessions.
        recorded: the address that the last ``ray start`` has recorded there; None without one.
        recorded_answers: whether a Ray answers at it.
        dead_heads: the addresses of heads that do not answer, of which nodes run here.
        ended_sessions: the directories of sessions without a process.
        taken_ports: the programs that listen on the default ports of a head, by port.
    """

    folder: str
    recorded: str | None
    recorded_answers: bool
    dead_heads: Sequence[str]
    ended_sessions: Sequence[str]
    taken_ports: Mapping[int, str]


def check_traces(traces: RayTraces) -> Iterator[Finding]:
    """Yield what hinders a start of Ray, and what may be deleted."""
    if traces.recorded is not None and not traces.recorded_answers:
        text = f"{traces.folder}/ray_current_cluster names a head at {traces.recorded}, where no Ray answers"
        remedy = "if that head is gone, run `ray stop --force` and delete the file: cluster=auto and `ray` would use it"
        yield Finding(check=_CHECK, level="warning", text=text, remedy=remedy)
    if traces.dead_heads:
        text = f"nodes run here whose heads do not answer: {first_few(traces.dead_heads)}"
        remedy = "end them with `ray stop --force` before the next `ray start`, which may wait for them"
        yield Finding(check=_CHECK, level="warning", text=text, remedy=remedy)
    if not traces.recorded_answers:
        for port, program in traces.taken_ports.items():
            option = "--port" if port == GCS_PORT else "--dashboard-port"
            text = f"port {port}, which `ray start --head` takes, is used by {program}"
            remedy = f"end that program, or give another port with {option}"
            yield Finding(check=_CHECK, level="warning", text=text, remedy=remedy)
    if traces.ended_sessions:
        names = first_few(traces.ended_sessions, 2)
        text = f"{len(traces.ended_sessions)} sessions in {traces.folder} have ended: {names}"
        yield Finding(check=_CHECK, level="ok", text=text, remedy="their logs may be deleted")


def ray_traces(ports: Iterable[int] = (GCS_PORT, DASHBOARD_PORT)) -> RayTraces:
    """Return what is left of Rays on this machine as far as this user sees it; ``ports``: those that a head uses."""
    folder = session_folder()
    recorded = address_of_ray_start()
    commands = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    in_use = {name for words in commands for word in words for name in _SESSION.findall(word)}
    sessions = [p for p in folder.glob("session_*") if p.is_dir() and not p.is_symlink()]
    return RayTraces(
        folder=str(folder),
        recorded=recorded,
        recorded_answers=recorded is not None and _answers(recorded),
        dead_heads=sorted(address for address in gcs_of_raylets_here() if not _answers(address)),
        ended_sessions=sorted(p.name for p in sessions if p.name not in in_use),
        taken_ports=_listeners(set(ports)),
    )


def _answers(address: str) -> bool:
    return probe_gcs(address, timeout_s=_TIMEOUT_S) in (None, "unauthenticated")


def _listeners(ports: set[int]) -> dict[int, str]:
    """Return the program that listens on each of the ports, as far as one does."""
    found: dict[int, str] = {}
    with contextlib.suppress(psutil.AccessDenied):
        for connection in psutil.net_connections("tcp"):
            address = connection.laddr
            if connection.status == psutil.CONN_LISTEN and address and address.port in ports:
                found[address.port] = _program(connection.pid)
    return found


def _program(pid: int | None) -> str:
    if pid is None:
        return "a program of another user"
    try:
        return f"{psutil.Process(pid).name()} (pid {pid})"
    except psutil.Error:
        return f"pid {pid}"

"""What earlier Rays have left on this machine, and how it hinders the next ``ray start``."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import psutil

from orchestrator.compat.ray.connection import address_of_ray_start, gcs_of_raylets_here, probe_gcs, session_folder
from orchestrator.config.text import first_few
from orchestrator.protocol.finding import Finding

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

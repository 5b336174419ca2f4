"""Find what earlier Rays have left on this machine."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from pathlib import Path

import psutil

from orchestrator.compat.ray.connection import address_of_ray_start, gcs_of_raylets_here, probe_gcs, session_folder
from orchestrator.policy.ray_traces import DASHBOARD_PORT, GCS_PORT, RayTraces

_TIMEOUT_S = 10.0
_SESSION = re.compile(r"session_\d{4}-[\w.-]+")


def ray_traces(ports: Iterable[int] = (GCS_PORT, DASHBOARD_PORT)) -> RayTraces:
    """Return what is left of Rays on this machine as far as this user sees it; ``ports``: those that a head uses."""
    folder = session_folder()
    recorded = address_of_ray_start()
    in_use = {name for words in _command_lines() for word in words for name in _SESSION.findall(word)}
    return RayTraces(
        folder=str(folder),
        recorded=recorded,
        recorded_answers=recorded is not None and _answers(recorded),
        dead_heads=sorted(address for address in gcs_of_raylets_here() if not _answers(address)),
        ended_sessions=sorted(p.name for p in folder.glob("session_*") if _is_session(p) and p.name not in in_use),
        taken_ports=_listeners(set(ports)),
    )


def _is_session(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _answers(address: str) -> bool:
    return probe_gcs(address, timeout_s=_TIMEOUT_S) in (None, "unauthenticated")


def _command_lines() -> list[list[str]]:
    return [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]


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

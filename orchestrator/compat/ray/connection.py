"""The Ray to which this process is, or could be, connected."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil

from orchestrator.compat.ray.internals import Internal, find_internal, replaced
from orchestrator.compat.ray.side_effects import ray_logs_errors_only

RECONNECT_TIMEOUT = "RAY_gcs_rpc_server_reconnect_timeout_s"
"""The environment variable that says after how many seconds without the GCS server Ray ends a process."""
_DEFAULT_RECONNECT_TIMEOUT_S = 60.0
_END_TIMEOUT_S = 600
"""The time that this process has in addition, to end by itself."""


def own_ray_has_died() -> bool:
    """Return whether this process started a Ray whose GCS server or raylet is dead; no call to it would return."""
    node = find_internal(Internal.NODE)
    return node is not None and any(kind in ("gcs_server", "raylet") for kind, _ in node.dead_processes())


def is_own_ray() -> bool:
    """Return whether this process started the Ray that it is connected to."""
    node = find_internal(Internal.NODE)
    return node is not None and bool(node.head)


def is_ray_client() -> bool:
    """Return whether this process is connected to a cluster through Ray Client."""
    return bool(find_internal(Internal.RAY_CLIENT).is_connected())


def session_folder() -> Path:
    """Return the directory in which Ray keeps the files of its sessions on this machine."""
    return Path(find_internal(Internal.SESSION_FOLDER)())


def address_of_ray_start() -> str | None:
    """Return ``host:port`` of the Ray that ``ray start`` left running on this machine; None if there is none."""
    address: str | None = find_internal(Internal.READ_ADDRESS)(None)
    return address


def reconnect_timeout_s() -> float:
    """Return after how many seconds without the GCS server a node of the cluster ends, as far as it is known here."""
    try:
        return float(os.environ[RECONNECT_TIMEOUT])
    except (KeyError, ValueError):
        return _DEFAULT_RECONNECT_TIMEOUT_S


@contextlib.contextmanager
def outliving_gcs() -> Iterator[None]:
    """Join a cluster in this context to outlive its GCS server by minutes; Ray would end this process with its nodes.

    Ray does so without an exception, from a thread in C++, and with a line of its own on stderr. Each of its clients
    keeps the timeout that is set when it is made; all of them are made here.
    """
    before = os.environ.get(RECONNECT_TIMEOUT)
    os.environ[RECONNECT_TIMEOUT] = str(int(reconnect_timeout_s()) + _END_TIMEOUT_S)
    read_environment()
    try:
        yield
        find_internal(Internal.GCS_ACCESSOR)()
    finally:
        if before is None:
            del os.environ[RECONNECT_TIMEOUT]
        else:
            os.environ[RECONNECT_TIMEOUT] = before


def loopback_accepted() -> contextlib.AbstractContextManager[None]:
    """Let Ray bind a node that starts in this context to a loopback address.

    Otherwise it takes an address to which the hostname resolves, which may not be on this machine.
    """
    return replaced(Internal.RESOLVE_LOCALHOST, lambda host: host)


def read_environment() -> None:
    """Let Ray read its environment variables and the user's token again, which it otherwise does once per process.

    Not to be called while this process is connected to a Ray, whose own settings it would lose.
    """
    find_internal(Internal.CONFIG).initialize("")
    find_internal(Internal.TOKENS).instance().reset_cache()


def use_token_of_user() -> None:
    """Send the user's Ray token, if one is stored, to the Ray that this process talks to, as ``ray.init`` does.

    Ray records this in ``RAY_AUTH_MODE``, and keeps it there.
    """
    with ray_logs_errors_only():
        find_internal(Internal.USE_TOKEN)(warn_if_disabled=False)


def probe_gcs(address: str, *, timeout_s: float, with_token: bool = True) -> str | None:
    """Call a GCS server.

    Args:
        address: ``host:port`` of the server.
        timeout_s: how long to wait for the answer.
        with_token: present the token of this process, if it has one; otherwise the call does not use TLS either.

    Returns:
        None if it answers, or else the gRPC status in lower case: ``unavailable``, ``unauthenticated``, ...
    """
    request = find_internal(Internal.GCS_REQUEST)()
    channel = find_internal(Internal.OPEN_CHANNEL)(address) if with_token else grpc.insecure_channel(address)
    stub = find_internal(Internal.GCS_STUB)(channel)
    try:
        stub.GetClusterId(request, timeout=timeout_s)
    except grpc.RpcError as e:
        status: str = e.code().name.lower()
        return status
    return None


def gcs_of_raylets_here() -> set[str]:
    """Return ``host:port`` of the GCS servers with which the raylets on this machine were started."""
    addresses: set[str] = find_internal(Internal.FIND_IN_RAYLETS)("--gcs-address")
    return addresses


def addresses_here(*, leave_out: str) -> list[str]:
    """Return ``host:port`` of the GCS servers of the raylets on this machine, those of the youngest raylet first.

    ``leave_out``: no raylet with this environment variable counts, and none on loopback whose variables are secret.
    """
    flag, found = "--gcs-address=", dict[str, float]()
    for raylet in psutil.process_iter(["cmdline", "create_time"]):
        words = raylet.info["cmdline"] or []
        address = next((word.removeprefix(flag) for word in words if word.startswith(flag)), "")
        if not address or not find_internal(Internal.IS_RAYLET)(words):
            continue
        try:
            counts = leave_out not in raylet.environ()
        except psutil.AccessDenied:
            counts = not address.startswith("127.")
        except psutil.NoSuchProcess:
            continue
        if counts:
            found[address] = max(found.get(address, 0.0), raylet.info["create_time"])
    return sorted(found, key=found.__getitem__, reverse=True)


def is_node_of(address: str, *, timeout_s: float) -> bool:
    """Return whether a raylet of the cluster runs on this machine; ``address`` is where its GCS server listens.

    ``ray.init`` waits a minute for one. True if the server does not answer.
    """
    try:
        return (
            not raylets_here()
            .keys()
            .isdisjoint(node.node_id.hex() for node in known_nodes(address, timeout_s=timeout_s))
        )
    except ConnectionError:
        return True


def raylets_here() -> dict[str, dict[str, str]]:
    """Return the environment variables of the raylets on this machine by node id; none of a raylet of another user."""
    flag, found = "--node_id=", dict[str, dict[str, str]]()
    for raylet in psutil.process_iter(["cmdline"]):
        words = raylet.info["cmdline"] or []
        node_id = next((word.removeprefix(flag) for word in words if word.startswith(flag)), None)
        if node_id is None or not find_internal(Internal.IS_RAYLET)(words):
            continue
        with contextlib.suppress(psutil.NoSuchProcess):
            try:
                found[node_id] = raylet.environ()
            except psutil.AccessDenied:
                found[node_id] = {}
    return found


def known_nodes(address: str, *, timeout_s: float, outlives: bool = False) -> list[Any]:
    """Return what a GCS server knows of the nodes of its cluster, dead ones too, without joining that.

    Args:
        address: ``host:port``.
        timeout_s: how long to wait for the answer.
        outlives: whether to wait as long for a server that does not run, because it is started again.

    Raises:
        ConnectionError: the server does not answer.
    """
    stub = find_internal(Internal.GCS_STUB)(find_internal(Internal.OPEN_CHANNEL)(address))
    request = find_internal(Internal.GCS_NODES_REQUEST)()
    try:
        answer = stub.GetAllNodeInfo(request, timeout=timeout_s, wait_for_ready=outlives)
    except grpc.RpcError as e:
        raise ConnectionError(f"the GCS server at {address} does not answer ({e.code().name.lower()})") from e
    return list(answer.node_info_list)

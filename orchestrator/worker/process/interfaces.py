"""The network of a worker: the interfaces that gloo and NCCL use, and connections to nodes that are lost."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Collection

import psutil

from orchestrator.protocol.messages import Assignment

LOOPBACK = "127.0.0.1"
"""The address of a store whose ranks are all on one node."""
GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"

_chosen: dict[str, str] = {}
"""What :func:`choose` has set in this process. Another value is the user's."""


def choose_for(assignment: Assignment, *, node_ip: str) -> None:
    """Let gloo stay on the loopback interface if all workers are on one node, but not NCCL, which keeps its choice.

    ``node_ip``: the address by which Ray knows this node.
    """
    gloo = LOOPBACK if assignment.store_host == LOOPBACK else node_ip
    choose(gloo, nccl=node_ip if assignment.backend == "nccl" else None)


def choose(gloo: str, *, nccl: str | None) -> None:
    """Let gloo and NCCL use the interfaces that have these addresses, unless the user has chosen others.

    NCCL reads its variable once in the life of a process, gloo whenever it forms a group. A process that may later
    communicate with another node therefore gives NCCL an address that is reachable from there, from the beginning.

    Args:
        gloo: the address for gloo, which also connects side groups of runs with NCCL.
        nccl: the address for NCCL; None if the process does not use it.

    Raises:
        LookupError: no interface has the address.
    """
    # Without the sign, NCCL takes the name as a prefix.
    for name, address, sign in ((GLOO, gloo, ""), (NCCL, nccl, "=")):
        if address is not None and os.environ.get(name) == _chosen.get(name):
            os.environ[name] = _chosen[name] = f"{sign}{interface_of(address)}"


def interface_of(ip: str) -> str:
    """Return the network interface that has the address ``ip``.

    Without it, gloo takes the interface that the hostname resolves to. On many machines this is the loopback interface,
    which other nodes cannot reach.

    Raises:
        LookupError: no interface has the address.
    """
    for name, addresses in psutil.net_if_addrs().items():
        if any(a.address == ip for a in addresses):
            return name
    raise LookupError(
        f"no network interface of this node has the address {ip}, by which Ray knows the node; set {GLOO} and {NCCL} "
        "to the interface to use, before `ray start` on this node or with cluster.env"
    )


def shut_down_connections(addresses: Collection[str]) -> None:
    """Shut down the TCP connections of this process to the IP addresses of lost nodes.

    A thread that waits for such a node sees the connection closed. Otherwise gloo would wait for its own timeout,
    because no FIN or RST arrives.
    """
    for connection in psutil.Process().net_connections(kind="tcp"):
        if connection.raddr and connection.raddr.ip in addresses and connection.fd >= 0:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fd)) as end:
                end.shutdown(socket.SHUT_RDWR)

"""The network of a worker: the interfaces of gloo and NCCL, connections to lost nodes, and the variables of NCCL."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Collection, Mapping

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


FLIGHT_RECORDS = 1000
"""The number of operations that torch's flight recorder keeps on a rank: several steps of them."""
_ALWAYS = {
    # From torch 2.15, "nccl" would be another backend, nccl2. Runs can use it, but it is younger.
    "TORCH_DIST_USE_NCCL2": "0",
    # The watchdog would end the process of a rank that waits for a lost one.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    # If the watchdog is the first to see an error, it asks all ranks to dump and then sleeps four times as long as the
    # dump may take, 60 s, while the destructor of the group waits for it. Our own call reads the flight recorder.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    # A second thread would end a process whose watchdog is stuck in a call of CUDA.
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # The watchdog would end the process by SIGABRT before Python has raised an error of the device, which names it.
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
}
_TO_RECOVER = {
    # NVIDIA's own in-process restart requires it: memory of NVLink SHARP may not survive an aborted communicator.
    "NCCL_NVLS_ENABLE": "0",
}


def nccl_variables(own: Mapping[str, str], *, recovers: bool) -> dict[str, str]:
    """Return the variables to set before the first process group is formed; what the user has set stays.

    Args:
        own: the environment of this process.
        recovers: whether the process may have to form another group after a failure.
    """
    wanted = {**_ALWAYS, **(_TO_RECOVER if recovers else {}), **flight_variables(own)}
    return {name: value for name, value in wanted.items() if name not in own}


def flight_variables(own: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that switches torch's flight recorder on, unless the environment ``own`` gives its size."""
    names = {"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"}  # the second is an older name
    return {} if names & own.keys() else {"TORCH_FR_BUFFER_SIZE": str(FLIGHT_RECORDS)}

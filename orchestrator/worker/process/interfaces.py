"""The network interfaces that gloo and NCCL use, in the environment variables from which they read them."""

from __future__ import annotations

import os

import psutil

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"

_chosen: dict[str, str] = {}
"""What :func:`choose` has set in this process. Another value is the user's."""


def choose(ip: str) -> None:
    """Let gloo and NCCL use the interface that has the address ``ip``, unless the user has chosen one.

    gloo connects side groups with NCCL, too.

    Raises:
        LookupError: no interface has the address.
    """
    free = [name for name in (GLOO, NCCL) if os.environ.get(name) == _chosen.get(name)]
    if not free:
        return
    interface = interface_of(ip)
    values = {GLOO: interface, NCCL: f"={interface}"}  # without the sign, NCCL takes it for the beginning of a name
    for name in free:
        os.environ[name] = _chosen[name] = values[name]


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

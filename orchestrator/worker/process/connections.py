"""TCP connections of this process to nodes that are lost, which nothing else closes."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Collection

import psutil


def shut_down(addresses: Collection[str]) -> None:
    """Shut down the connections to these IP addresses.

    A thread that waits for such a node sees the connection closed. Otherwise gloo would wait for its own timeout,
    because no FIN or RST arrives.
    """
    for connection in psutil.Process().net_connections(kind="tcp"):
        if connection.raddr and connection.raddr.ip in addresses and connection.fd >= 0:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fd)) as end:
                end.shutdown(socket.SHUT_RDWR)

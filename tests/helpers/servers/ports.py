"""Ports for the servers of tests."""

import contextlib
import random
import socket
from pathlib import Path

ABOVE_RAY = 20_000
"""The workers of a Ray that ``ray start`` has started listen below."""
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """A port of the loopback interface on which nothing listens.

    It is none of those that the kernel gives away, one of which another process could get before the server listens.
    """
    below = int(EPHEMERAL.read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(ABOVE_RAY, below)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port

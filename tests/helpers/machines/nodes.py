"""Nodes of a cluster on this machine that have something of their own."""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from helpers.records.runs import wait_for

_SET_UP = 'mount -t tmpfs tmpfs "$0" && hostname "$1" && shift && exec "$@"'
_PATIENCE = {"RAY_agent_register_timeout_ms": "100000"}
"""On a busy machine, the agents of a node take longer than Ray's 30 s, after which the node ends."""


@contextlib.contextmanager
def node_with_its_own(
    folder: Path, address: str, count_nodes: Callable[[], int], *, num_cpus: int = 1, name: str = socket.gethostname()
) -> Iterator[int]:
    """A node of the cluster at ``address`` on which another file system is mounted at ``folder``.

    ``count_nodes``: the number of living nodes. ``name``: the name of its host. ``disks.require_mounts`` comes first.
    Yields the process in whose namespaces a command is on the node (``nsenter --mount --uts``).
    """
    before = count_nodes()
    ray = Path(sys.executable).with_name("ray")
    start = [ray, "start", f"--address={address}", f"--num-cpus={num_cpus}", "--block"]
    process = subprocess.Popen(
        ["unshare", "--mount", "--uts", "sh", "-c", _SET_UP, folder, name, *start],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **_PATIENCE},
        start_new_session=True,
    )
    try:
        wait_for(lambda: process.poll() is not None or count_nodes() > before, "the node")
        assert process.poll() is None, "the node has not started"
        yield process.pid
    finally:
        process.terminate()
        process.wait(30)

"""Several hosts on one machine: each with its own network, host name, processes and Ray directories (Linux namespaces).

Hosts share the file system, as with NFS, except for what a test mounts on one of them. What can go wrong with names and
interfaces does: the name of a host resolves to loopback (Debian's default), no address has a name, the name server does
not answer, and a second interface has the same address on every host, as that of Docker.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from helpers.machines import commands
from helpers.records.runs import wait_for

_PREFIX = "10.77.0"
NAME_SERVER = f"{_PREFIX}.253"
"""The address of the name server, which no host has."""
_NAMESPACES = ("--net", "--mount", "--uts", "--pid")
_TMPDIR = "/tmp/ray"
"""A directory of its own on each host, with a short path: sockets of Ray are below it."""
_SET_UP = f"""
ip link set lo up
ip link add a0 type bridge
ip address add 172.31.99.1/24 dev a0
ip link set a0 up
ip address add "$ADDRESS/24" dev eth0
ip link set eth0 up
ip route add default via {_PREFIX}.254
hostname "$NAME"
mkdir -p {_TMPDIR}
mount -t tmpfs tmpfs {_TMPDIR}
mount -t tmpfs tmpfs /dev/shm
printf '127.0.0.1 localhost\\n127.0.1.1 %s\\n' "$NAME" > /dev/shm/hosts
printf 'nameserver {NAME_SERVER}\\n' > /dev/shm/resolv.conf
mount --bind /dev/shm/hosts /etc/hosts
mount --bind /dev/shm/resolv.conf /etc/resolv.conf
"""


@dataclass(frozen=True)
class Host:
    """One host. ``pid`` is its first process, as this machine numbers it; all others end with it."""

    name: str
    address: str
    pid: int

    def start(self, *words: str | Path, cwd: Path = Path("/"), env: dict[str, str], **pipes: Any) -> Any:
        """Start a command on this host, with the environment that :func:`commands.environment` gives and ``env``."""
        return subprocess.Popen(
            ["nsenter", f"--target={self.pid}", *_NAMESPACES, "env", f"--chdir={cwd}", *map(str, words)],
            env=commands.environment(RAY_AUTH_MODE="disabled", TMPDIR=_TMPDIR, **env),
            text=True,
            **pipes,
        )

    def run(self, *words: str | Path, cwd: Path = Path("/"), timeout_s: float = 100, **env: str) -> tuple[int, str]:
        """Run a command on this host to its end; returns its exit code, and its output and errors in one."""
        with self.start(*words, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
            try:
                output, _ = process.communicate(timeout=timeout_s)
            finally:
                process.kill()
        return process.returncode, output

    def launch(self, *overrides: str, cwd: Path, timeout_s: float = 100, **env: str) -> tuple[int, str]:
        """Run our command with ``cluster=auto`` on this host, as :meth:`run` does."""
        words = (sys.executable, "-m", "orchestrator.launch", "cluster=auto", *overrides)
        return self.run(*words, cwd=cwd, timeout_s=timeout_s, **env)

    def script(self, text: str, **env: str) -> None:
        """Run the shell script ``text`` on this host, each line of which must succeed."""
        code, output = self.run("sh", "-ec", text, **env)
        assert code == 0, output

    def mount_empty(self, folder: Path) -> None:
        """Mount an empty file system that only this host has at ``folder``."""
        self.script(f"mount -t tmpfs tmpfs '{folder}'")


@contextlib.contextmanager
def hosts(*names: str) -> Iterator[tuple[Host, ...]]:
    """Hosts on one network, as long as the block runs; skips the test where this machine does not permit them."""
    _require_namespaces()
    with contextlib.ExitStack() as running:
        switch = running.enter_context(_first_process("--net"))
        _ip(switch, "link", "add", "switch", "type", "bridge")
        _ip(switch, "address", "add", f"{_PREFIX}.254/24", "dev", "switch")
        _ip(switch, "link", "set", "switch", "up")
        made = []
        for number, name in enumerate(names, 9):  # in the order of text, 10 is before 9
            pid = running.enter_context(_first_process(*_NAMESPACES, "--mount-proc"))
            _ip(switch, "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", str(pid))
            _ip(switch, "link", "set", name, "master", "switch", "up")
            host = Host(name, f"{_PREFIX}.{number}", pid)
            host.script(_SET_UP, NAME=name, ADDRESS=host.address)
            made.append(host)
        yield tuple(made)


def start_ray(
    cpus: dict[Host, int], env: dict[Host, dict[str, str]] | None = None, *, head: Host | None = None
) -> None:
    """Start Ray on each host with its number of CPUs. It ends with the hosts.

    Args:
        cpus: the hosts.
        env: environment variables of the Ray of a host.
        head: the host on which Ray runs already; None for the first of ``cpus``, where it starts as the head.
    """
    starts = head is None
    head = head or next(iter(cpus))
    ray = Path(sys.executable).with_name("ray")
    for host, number in cpus.items():
        role = (
            ["--head", "--include-dashboard=false"] if starts and host is head else [f"--address={head.address}:6379"]
        )
        code, output = host.run(
            ray, "start", *role, f"--num-cpus={number}", "--disable-usage-stats", **(env or {}).get(host, {})
        )
        assert code == 0, output


def _require_namespaces() -> None:
    """Skip the test if this process may not make hosts, or has no ``ip``."""
    probe = ["unshare", *_NAMESPACES, "--fork", "ip", "link", "add", "probe", "type", "bridge"]
    if os.geteuid() != 0 or subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip("hosts on one machine need root, network namespaces and iproute2")


@contextlib.contextmanager
def _first_process(*namespaces: str) -> Iterator[int]:
    """The first process in new namespaces; all others in them are killed with it, and leave no zombies to it."""
    first = ["env", "--ignore-signal=CHLD", "sleep", "infinity"]
    unshare = subprocess.Popen(["unshare", *namespaces, "--fork", "--kill-child", *first])
    try:
        yield wait_for(lambda: [c.pid for c in psutil.Process(unshare.pid).children() if c.name() == "sleep"])[0]
    finally:
        unshare.kill()
        unshare.wait(10)


def _ip(pid: int, *words: str) -> None:
    """Change the network in which the process ``pid`` runs."""
    subprocess.run(["nsenter", f"--target={pid}", "--net", "ip", *words], check=True)

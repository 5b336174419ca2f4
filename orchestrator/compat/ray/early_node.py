"""The processes of a Ray, started before this process connects to it.

``ray.init`` starts Ray's processes, waits until they are up, and connects. Here it is called twice: the first call
returns when it has started them, and the second one connects to these instead of starting others.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from orchestrator.compat.ray.internals import Internal, find_internal, owner_of, replaced

_READY_TIMEOUT_S = 30.0
"""The time in which ``ray.init`` itself wants to see a node."""
_END_TIMEOUT_S = 30.0
_POLL_S = 0.02
_PORTS = (
    "node_manager_port",
    "runtime_env_agent_port",
    "metrics_agent_port",
    "metrics_export_port",
    "dashboard_agent_listen_port",
)


class _StartedError(Exception):
    """The processes are started."""


@dataclass(frozen=True)
class _Started:
    """A node whose processes run and to which nothing is connected, and the parameters that it was made with."""

    node: Any
    parameters: Any


_waiting: _Started | None = None


def start(init: Callable[[], None], *, num_workers: int) -> None:
    """Call ``init``, which calls ``ray.init``, and return when Ray's processes are started.

    ``num_workers``: the worker processes that Ray starts at once, for whichever job comes first.
    """
    global _waiting
    popen, make_node = find_internal(Internal.POPEN), find_internal(Internal.NODE_CLASS)
    made: list[_Started] = []

    def spawn(command: Sequence[str], *args: Any, **options: Any) -> subprocess.Popen[Any]:
        flag = "--num_prestart_python_workers="
        command = [f"{flag}{num_workers}" if word.startswith(flag) else word for word in command]
        process: subprocess.Popen[Any] = popen(command, *args, **options)
        return process

    def make(ray_params: Any, **options: Any) -> Any:
        made.append(_Started(make_node(ray_params, **options), ray_params))
        return made[0].node

    def stop(*_: Any, **__: Any) -> None:
        raise _StartedError

    with (
        replaced(Internal.POPEN, spawn),
        replaced(Internal.NODE_CLASS, make),
        replaced(Internal.CONNECT, stop),
        replaced(Internal.GET_NODE, lambda *_: dict.fromkeys(_PORTS, 0)),
        contextlib.suppress(_StartedError),
    ):
        init()
    _waiting = made[0]


@contextlib.contextmanager
def adopted(*, num_gpus: int) -> Iterator[None]:
    """Connect to the processes that :func:`start` has started by calling ``ray.init`` in this context.

    If there are none, or they were not started for ``num_gpus`` GPUs, it starts others.
    """
    global _waiting
    started = _waiting
    if started is None or int(started.node.get_resource_and_label_spec().num_gpus or 0) != num_gpus:
        end()
        yield
        return
    with replaced(Internal.NODE_CLASS, lambda **_: _ready(started)):
        yield
    _waiting = None


def end() -> None:
    """End the processes to which nothing has been connected, and remove their files."""
    global _waiting
    if _waiting is None:
        return
    node, _waiting = _waiting.node, None
    servers = [psutil.Process(process.pid) for _, process in node.live_processes()]
    for server in servers:  # so that they start nothing more
        server.suspend()
    processes = [*servers, *(child for server in servers for child in server.children(recursive=True))]
    for process in processes:  # the agents would outlive the raylet by a minute
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    node.kill_all_processes(check_alive=False)
    psutil.wait_procs(processes, timeout=_END_TIMEOUT_S)
    folder = Path(node.get_session_dir_path())
    shutil.rmtree(folder, ignore_errors=True)
    latest = folder.with_name("session_latest")
    with contextlib.suppress(OSError):
        if latest.readlink() == folder:
            latest.unlink()
    owner, attribute = owner_of(Internal.NODE)
    setattr(owner, attribute, None)


def _ready(started: _Started) -> Any:
    """Wait until Ray knows the node, and return it with the ports at which it is reached."""
    node = started.node
    deadline = time.monotonic() + _READY_TIMEOUT_S
    while True:
        try:
            found = find_internal(Internal.GET_NODE)(node.gcs_address, node.node_id)
            break
        except RuntimeError as e:  # it has not registered yet
            if time.monotonic() > deadline or any(node.dead_processes()):
                raise RuntimeError("its processes ended, or were not up in time") from e
            time.sleep(_POLL_S)
    started.parameters.update(**{name: found[name] for name in _PORTS})
    return node

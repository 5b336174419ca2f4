"""Connecting to Ray: the one of the address, or one embedded in this process."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import signal
import socket
import threading
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import grpc
import psutil
import ray
import ray.exceptions
from ray._private import services
from ray._private import utils as ray_utils
from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available
from ray._private.grpc_utils import init_grpc_channel
from ray._private.ray_logging import global_worker_stdstream_dispatcher
from ray._private.services import find_bootstrap_address
from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

from orchestrator.config.build import ConfigError
from orchestrator.config.schema import ClusterConfig
from orchestrator.planning.plan import Node

CONNECT_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class Connection:
    """``owned``: this process started that Ray, and ends it."""

    owned: bool


def target_address(config: ClusterConfig) -> str | None:
    """The address of the Ray to use; None: embed one."""
    address = config.address or os.environ.get("RAY_ADDRESS")
    return None if address in (None, "", "local") else address


def this_machine(gpus: int) -> Node:
    """This machine as the only node of an embedded Ray."""
    cores = len(os.sched_getaffinity(0))
    return Node(node_id="local", name=socket.gethostname(), cpus=cores, gpus=gpus)


def embed(config: ClusterConfig, *, num_cpus: float, num_gpus: int) -> Connection:
    """Start a Ray in this process, or use the one that it already has."""
    if ray.is_initialized():
        return Connection(owned=False)
    # A laptop run reports to nobody, and what the reporting costs comes out of the training.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_enable_metrics_collection", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # The workers that Ray starts in advance import torch while this process is still connecting.
    os.environ.setdefault("RAY_preload_python_modules", "orchestrator.worker.actor")
    with _signals_kept_from_ray():
        ray.init(
            address="local",
            num_cpus=math.ceil(num_cpus),
            num_gpus=num_gpus,
            include_dashboard=config.dashboard,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    silence_raylet_prints()
    return Connection(owned=True)


def address_error(address: str) -> str | None:
    """What is wrong with the address or with the server there, in a line."""
    error = None if ray.is_initialized() else _error(address)
    return error and f"{_shown(address)}: {error}"


def connect(address: str) -> Connection:
    """Join the cluster at ``address``, which has no :func:`address_fault`.

    Raises:
        ConfigError: Ray cannot join it.
    """
    if ray.is_initialized():
        return Connection(owned=False)
    try:
        with _signals_kept_from_ray():
            ray.init(address=_gcs_address(address), log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError, ray.exceptions.RayError) as e:
        raise ConfigError([f"{_shown(address)}: {' '.join(str(e).split())[:500]}"]) from e
    silence_raylet_prints()
    return Connection(owned=True)


def disconnect(connection: Connection) -> None:
    if connection.owned:
        ray.shutdown()


def has_died() -> bool:
    """Whether the Ray that this process started is gone: nobody would answer any more."""
    node = ray._private.worker._global_node
    return node is not None and any(kind in ("gcs_server", "raylet") for kind, _ in node.dead_processes())


def nodes() -> tuple[Node, ...]:
    """The living nodes with all they have, free or not."""
    return tuple(
        Node(
            node_id=n["NodeID"],
            name=n["NodeManagerHostname"],
            cpus=n["Resources"].get("CPU", 0.0),
            gpus=int(n["Resources"].get("GPU", 0)),
        )
        for n in ray.nodes()
        if n["Alive"]
    )


def leaving_nodes() -> Collection[str]:
    """The nodes that have been told to drain, by their ids."""
    return ray._private.state.state.get_draining_nodes()


@contextlib.contextmanager
def _signals_kept_from_ray() -> Iterator[None]:
    """While Ray starts, it leaves SIGTERM to us, and each process that it starts gets a group of its own, so that
    what goes to a whole group (Ctrl-C, ``timeout``) reaches this process alone.
    """
    set_handler, popen = ray_utils.set_sigterm_handler, services.ConsolePopen
    ray_utils.set_sigterm_handler = lambda handler: None
    services.ConsolePopen = functools.partial(popen, process_group=0)  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        ray_utils.set_sigterm_handler = set_handler
        services.ConsolePopen = popen  # type: ignore[misc]
        if threading.current_thread() is threading.main_thread():
            # Below Python, Ray has set a handler that prints the stack and aborts three seconds later.
            signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
            signal.alarm(0)


def silence_raylet_prints() -> None:
    """Ray prints its own words for every death across the console; ours name rank and reason."""
    global_worker_stdstream_dispatcher.remove_handler("ray_print_logs")
    ray._private.worker.print_to_stdstream = lambda *_, **__: None


def _shown(address: str) -> str:
    key = "cluster.address" if os.environ.get("RAY_ADDRESS") != address else "RAY_ADDRESS"
    return f"{key}={address}"


def _error(address: str) -> str | None:
    scheme, separator, _ = address.partition("://")
    if scheme == "ray" and separator:
        return (
            "Ray Client is not supported; submit the command with `ray job submit`, or run it on a node of the "
            "cluster with cluster=auto"
        )
    if separator:
        return f"{scheme} is for `ray job submit`; give host:port of the cluster, or cluster=local for a Ray of its own"
    gcs = _gcs_address(address)
    if gcs is None:
        return "no Ray runs on this machine; `ray start --head` starts one; or give host:port, or use cluster=local"
    host, _, port = gcs.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        return "expected auto, local or host:port"
    return _refusal(gcs)


def _gcs_address(address: str) -> str | None:
    """Host and port; for ``auto`` those that ``ray start`` left on this machine, None if it did not.

    Ray's own ``auto`` would take any Ray of the machine, one that is embedded in another run too.
    """
    return address if address != "auto" else find_bootstrap_address(None)


def _refusal(gcs: str) -> str | None:
    """What is wrong with the server there. Ray itself finds out, noisily, after twenty seconds."""
    if _is_this_machine(gcs):
        # `ray start` asks for the token of this user if there is one, so it may be shown here.
        logging.getLogger("ray").setLevel(logging.ERROR)
        maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    stub = gcs_service_pb2_grpc.NodeInfoGcsServiceStub(init_grpc_channel(gcs))
    try:
        stub.GetClusterId(gcs_service_pb2.GetClusterIdRequest(), timeout=CONNECT_TIMEOUT_S)
    except grpc.RpcError as e:
        if e.code() == grpc.StatusCode.UNAUTHENTICATED:
            return (
                "this Ray asks for another token; set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN (or RAY_AUTH_TOKEN_PATH) "
                "to what it was started with"
            )
        return f"no Ray answers there ({e.code().name.lower()}); is it running? `ray start --head` starts one"
    return None


def _is_this_machine(gcs: str) -> bool:
    host = gcs.rpartition(":")[0].strip("[]")
    own = {a.address for addresses in psutil.net_if_addrs().values() for a in addresses}
    return host in own or host in ("localhost", socket.gethostname())

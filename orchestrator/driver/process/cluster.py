"""Connecting to Ray: to a running cluster, or to a Ray that is embedded in this process."""

from __future__ import annotations

import contextlib
import functools
import http.client
import logging
import math
import os
import re
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import psutil
import ray
import ray.exceptions
from ray.job_config import JobConfig

from orchestrator.compat.ray import early_node, side_effects
from orchestrator.compat.ray.connection import (
    address_of_ray_start,
    addresses_here,
    gcs_of_raylets_here,
    is_node_of,
    is_ray_client,
    known_nodes,
    loopback_accepted,
    outliving_gcs,
    probe_gcs,
    read_environment,
    use_token_of_user,
)
from orchestrator.compat.ray.gcs import all_nodes
from orchestrator.config.build import ConfigError
from orchestrator.config.operation import ClusterConfig
from orchestrator.driver.process.calls import watched_head
from orchestrator.planning.plan import Node
from orchestrator.policy.node_check import without_excluded

AUTO = "auto"
CONNECT_TIMEOUT_S = 2.0
BUSY_TIMEOUT_S = 15.0
"""The time for a GCS server to answer that has let :data:`CONNECT_TIMEOUT_S` pass: its machine may be busy."""
HTTP_TIMEOUT_S = 1.0
LOOPBACK = "127.0.0.1"
EARLY_CPUS = 10_000
"""More than any run on one machine asks for."""

_EMBEDDED = "ORCHESTRATOR_EMBEDDED_RAY"
EMBEDDED_ENVIRONMENT = {
    _EMBEDDED: "1",
    # An embedded Ray needs no usage reports or metrics, and collecting them takes CPU time from the training.
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # The workers that Ray starts in advance import torch while this process is still connecting.
    "RAY_preload_python_modules": "orchestrator.worker.actor",
    # glibc gives each thread a heap, whose pieces of 64 MB it returns to the system whenever one is empty: with tensors
    # of 16 to 32 MB in every step. The heap of the process does not do that.
    "MALLOC_ARENA_MAX": "1",
}
"""Set while an embedded Ray runs, unless the user has set them."""

_GPU = "accelerator_type:"
"""How the resource of a node begins that has the name of its GPUs."""

_NO_NODE = (
    "this machine is no node of that cluster, and a driver has to run on one; run the command on a node, or use "
    "`orchestrator submit`"
)


def target_address(config: ClusterConfig) -> str | None:
    """Return the address of the Ray to join; None to embed one.

    A Ray that this process is already connected to is used, whatever the address says.
    """
    address = config.address or _address_of_environment()
    if address in (None, "local"):
        return AUTO if ray.is_initialized() else None
    return _named(address)


def is_connected() -> bool:
    """Return whether this process is connected to a Ray."""
    return bool(ray.is_initialized())


@contextlib.contextmanager
def embedded(
    config: ClusterConfig,
    *,
    num_cpus: float,
    num_gpus: int,
    num_processes: int,
    metadata: dict[str, str] | None = None,
) -> Iterator[None]:
    """Run a Ray in this process, which has none.

    Args:
        config: the section ``cluster`` of the configuration.
        num_cpus: the CPUs that Ray counts, however many this machine has.
        num_gpus: the GPUs that Ray counts.
        num_processes: the number of worker processes, which Ray starts in advance as far as there are cores.
        metadata: what the dashboard shows about the job.

    Raises:
        ConfigError: Ray does not start.
    """
    # Ray would start a process for each CPU that it counts, and each of them imports torch.
    at_once = {"RAY_worker_maximum_startup_concurrency": str(min(num_processes, len(os.sched_getaffinity(0))))}
    with side_effects.environment_defaults(EMBEDDED_ENVIRONMENT | at_once), _shut_down_afterwards():
        try:
            services = contextlib.nullcontext() if config.dashboard else side_effects.without_services()
            with loopback_accepted(), services, early_node.adopted(num_gpus=num_gpus):
                _init(
                    address="local",
                    _node_ip_address=LOOPBACK,
                    num_cpus=math.ceil(num_cpus),
                    num_gpus=num_gpus,
                    include_dashboard=config.dashboard,
                    job_config=JobConfig(metadata=metadata),
                )
        except Exception as e:  # of any type: Ray raises Exception itself if its processes are not up after 30 s
            folder = f"{os.environ.get('RAY_TMPDIR') or '/tmp'}/ray"
            remedy = (
                f"its files and logs are in {folder} (RAY_TMPDIR sets another place); on a busy machine, start again "
                "when there are free CPUs"
            )
            raise ConfigError(
                [f"cluster=local: Ray does not start on this machine: {_in_one_line(e)}; {remedy}"]
            ) from e
        yield


@contextlib.contextmanager
def started_early(num_workers: int) -> Iterator[None]:
    """Start the processes of a Ray for :func:`embedded`, with ``num_workers`` processes of workers, and do not wait.

    On exit, they end without a trace if it has not connected to them.
    """
    cores = str(len(os.sched_getaffinity(0)))
    environment = {"RAY_worker_maximum_startup_concurrency": cores, "RAY_enable_worker_prestart": "1"}
    # Which CPUs a run needs is not known yet. Ray counts them only to place actors, of which there are no others.
    options = {"num_cpus": EARLY_CPUS, "include_dashboard": False}
    init = functools.partial(_init, address="local", _node_ip_address=LOOPBACK, **options)
    with (
        contextlib.suppress(Exception),  # what is wrong, embedded() finds as well
        side_effects.environment_defaults(EMBEDDED_ENVIRONMENT | environment),
        loopback_accepted(),
        side_effects.without_services(),
    ):
        early_node.start(init, num_workers=num_workers)
    try:
        yield
    finally:
        early_node.end()


def address_error(address: str, *, key: str | None = None) -> str | None:
    """Return what is wrong with the address or with the server there, in one line; None if nothing is.

    ``key``: what the user has typed it for; None for the key of a run or ``RAY_ADDRESS``.
    """
    if is_ray_client():
        return (
            "this process uses Ray Client (ray://), which is not supported; call ray.shutdown() first, or run on a "
            "node of the cluster"
        )
    named = _named(address)
    error = None if ray.is_initialized() else _error(named)
    return error and f"{_to_cli(named) if key is None or named != address else f'{key}={address}'}: {error}"


def gcs_address(address: str) -> str | None:
    """Return host:port. For ``auto``, it is found as by Ray itself; None if there is none.

    That is ``RAY_ADDRESS``, or the Ray that runs here: of several, the one that ``ray start`` has recorded, or else the
    youngest. Unlike Ray, this leaves out those that are embedded in runs.
    """
    if (named := _named(address)) != AUTO:
        return named
    here, recorded = addresses_here(leave_out=_EMBEDDED), address_of_ray_start()
    return recorded if not here or recorded in here else here[0]


def choice_of_address(config: ClusterConfig) -> str | None:
    """Return which Ray ``cluster=auto`` has taken, where it is connected; None if the user has named it."""
    if config.address != AUTO:
        return None
    taken = ray.get_runtime_context().gcs_address
    others = [a for a in addresses_here(leave_out=_EMBEDDED) if a != taken]
    if _named(AUTO) != AUTO:
        return f"cluster=auto: the Ray at {taken}, as RAY_ADDRESS says"
    if others:
        return f"cluster=auto: the Ray at {taken}; cluster.address=host:port takes another: {', '.join(others)}"
    return f"cluster=auto: the Ray at {taken}"


@contextlib.contextmanager
def connected(address: str, *, metadata: dict[str, str] | None = None) -> Iterator[None]:
    """Join the cluster at ``address``, for which :func:`address_error` returns None; leave it on exit.

    A Ray that the process is already connected to is used, and stays connected. Otherwise the dashboard shows
    ``metadata``.

    Raises:
        ConfigError: Ray cannot join the cluster.
    """
    if ray.is_initialized():
        with _watched_head():
            yield
        return
    with _shut_down_afterwards():
        try:
            with outliving_gcs():
                _init(address=gcs_address(address), job_config=JobConfig(metadata=metadata))
        except (ConnectionError, ValueError, RuntimeError, ray.exceptions.RayError) as e:
            raise ConfigError([f"{_to_cli(address)}: {version_error(str(e)) or _in_one_line(e)}"]) from e
        with _watched_head():
            yield


def _watched_head() -> contextlib.AbstractContextManager[None]:
    return watched_head(ray.get_runtime_context().gcs_address)


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:500]


def version_error(text: str) -> str | None:
    """Return what an error of ``ray.init`` says about versions that differ; None if it is about something else."""
    ray_versions, python_versions = (re.findall(rf"{name}: (\S+)", text) for name in ("Ray", "Python"))
    if len(ray_versions) != 2 or len(python_versions) != 2:
        return None
    there, here = (f"Ray {r} and Python {p}" for r, p in zip(ray_versions, python_versions, strict=True))
    return (
        f"the cluster has {there}, this process {here}; use the environment of the cluster, or `orchestrator submit`, "
        "which runs the driver there"
    )


def nodes() -> tuple[Node, ...]:
    """Return the living nodes with all their resources, whether free or in use."""
    return _living(all_nodes())


def _living(found: Sequence[Any]) -> tuple[Node, ...]:
    return tuple(
        Node(
            node_id=n.node_id.hex(),
            name=n.node_manager_hostname,
            cpus=n.resources_total.get("CPU", 0.0),
            gpus=int(n.resources_total.get("GPU", 0)),
            address=n.node_manager_address,
            gpu_name=next((r.removeprefix(_GPU) for r in n.resources_total if r.startswith(_GPU)), ""),
        )
        for n in found
        if n.state == n.ALIVE
    )


def nodes_without_joining(config: ClusterConfig, address: str) -> tuple[Node, ...]:
    """Return the nodes that :func:`allowed_nodes` would return in the cluster at ``address``, which it does not join.

    :func:`address_error` has returned None for the address.

    Raises:
        ConfigError: the cluster does not answer any more.
    """
    if ray.is_initialized():
        return allowed_nodes(config)
    try:
        found = known_nodes(str(gcs_address(address)), timeout_s=BUSY_TIMEOUT_S)
    except ConnectionError as e:
        raise ConfigError([f"{_to_cli(address)}: {e}"]) from e
    return without_excluded(_living(found), config.exclude_nodes)


def allowed_nodes(config: ClusterConfig) -> tuple[Node, ...]:
    """Return the living nodes that ``cluster.exclude_nodes`` does not name."""
    return without_excluded(nodes(), config.exclude_nodes)


def asks_for_token() -> bool:
    """Return whether the connected Ray asks for a token. True if that is unknown, as with TLS."""
    address = ray.get_runtime_context().gcs_address
    return probe_gcs(address, timeout_s=CONNECT_TIMEOUT_S, with_token=False) is not None


def excluded_nodes(exclude_nodes: Sequence[str]) -> set[str]:
    """Return the ids of the present nodes that ``cluster.exclude_nodes`` names, by name or address."""
    present = nodes() if exclude_nodes else ()
    return {n.node_id for n in set(present).difference(without_excluded(present, exclude_nodes))}


def _init(**options: Any) -> None:
    with side_effects.signals_kept_from_ray(), side_effects.breakpoints_kept_from_ray():
        ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)


@contextlib.contextmanager
def _shut_down_afterwards() -> Iterator[None]:
    with side_effects.process_kept_from_ray(), side_effects.raylet_messages_muted():
        try:
            yield
        finally:
            ray.shutdown()


def _named(address: str) -> str:
    """Return ``address``; for ``auto`` the one in ``RAY_ADDRESS``, if that names a Ray."""
    of_environment = _address_of_environment()
    return of_environment if address == AUTO and of_environment not in (None, "local") else address


def _address_of_environment() -> str | None:
    return os.environ.get("RAY_ADDRESS") or None


def _to_cli(address: str) -> str:
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
        return f"{scheme} is for `ray job submit`; give host:port of the cluster, or cluster=local to embed Ray"
    gcs = gcs_address(address)
    if gcs is None:
        return "no Ray runs on this machine; start one with `ray start --head`, give host:port, or use cluster=local"
    host, _, port = gcs.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        return "expected auto, local or host:port"
    return _gcs_error(gcs)


def _gcs_error(gcs: str) -> str | None:
    """Return why the server at ``gcs`` cannot be used. ``ray.init`` takes 20 s to find out, and logs all the while."""
    read_environment()
    status = probe_gcs(gcs, timeout_s=CONNECT_TIMEOUT_S)
    if status == "deadline_exceeded":
        status = probe_gcs(gcs, timeout_s=BUSY_TIMEOUT_S)
    if status == "unauthenticated" and _is_used_here(gcs):
        # `ray start` on this machine has presented the user's token, so the server may see it.
        use_token_of_user()
        status = probe_gcs(gcs, timeout_s=BUSY_TIMEOUT_S)
    if status == "unauthenticated":
        return (
            "this Ray requires a token, and yours is missing or another one; set RAY_AUTH_MODE=token and "
            "RAY_AUTH_TOKEN (or RAY_AUTH_TOKEN_PATH) to the values that it was started with; on a node, copy "
            "~/.ray/auth_token from the head"
        )
    if status is None:
        return None if is_node_of(gcs, timeout_s=BUSY_TIMEOUT_S) else _NO_NODE
    if _is_web_server(gcs):
        return (
            "a web server answers there, as Ray's dashboard does on port 8265; give the port of the GCS, which is 6379 "
            f"by default, or use `orchestrator submit --address http://{gcs}`"
        )
    return f"no Ray answers there ({status}); is it running? Start one with `ray start --head`"


def _is_web_server(address: str) -> bool:
    connection = http.client.HTTPConnection(address, timeout=HTTP_TIMEOUT_S)
    try:
        connection.request("HEAD", "/")
        connection.getresponse()
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
    return True


def _is_used_here(gcs: str) -> bool:
    """Return whether the server is on this machine, or a node of its cluster is."""
    host, _, port = gcs.rpartition(":")
    own = {a.address for addresses in psutil.net_if_addrs().values() for a in addresses}
    if host.strip("[]") in own or host in ("localhost", socket.gethostname()):
        return True
    joined = {other for other, _, its_port in (a.rpartition(":") for a in gcs_of_raylets_here()) if its_port == port}
    return host in joined or any(_resolved(host) & _resolved(other) for other in joined)


def _resolved(host: str) -> set[str]:
    """Return the addresses of a host; itself if it has none."""
    try:
        return {str(info[4][0]) for info in socket.getaddrinfo(host.strip("[]"), None)}
    except OSError:
        return {host}

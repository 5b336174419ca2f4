"""Every use of Ray's private interfaces, written against Ray 2.60.0.

Ray may move these names in any release. Each is looked up at the moment of its use, so that an error names the one
that moved, and ``tests/unit/test_compat_ray.py`` checks all of :data:`INTERNALS` against the installed Ray.
What a context manager patches here is restored when it exits; only :func:`keep_process_title` patches for good.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import importlib
import json
import logging
import os
import signal
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc
import ray
import ray.exceptions

from orchestrator.compat.ray_job import submission_id

CHECKED_VERSION = "2.60.0"

_SET_SIGTERM_HANDLER = "ray._private.utils.set_sigterm_handler"
_POPEN = "ray._private.services.ConsolePopen"
_PRINT = "ray._private.worker.print_to_stdstream"
_NODE = "ray._private.worker._global_node"
_DEAD_PROCESSES = "ray._private.node.Node.dead_processes"
_DRAINING_NODES = "ray._private.state.state.get_draining_nodes"
_READ_ADDRESS = "ray._private.services.find_bootstrap_address"
_FIND_NODE_IDS = "ray._private.services.find_node_ids"
_RESOLVE_LOCALHOST = "ray._private.services.resolve_ip_for_localhost"
_RAY_CLIENT = "ray.util.client.ray"
_USE_TOKEN = "ray._private.authentication.authentication_token_setup.maybe_enable_token_auth_if_token_available"
_OPEN_CHANNEL = "ray._private.grpc_utils.init_grpc_channel"
_GCS_STUB = "ray.core.generated.gcs_service_pb2_grpc.NodeInfoGcsServiceStub"
_GCS_REQUEST = "ray.core.generated.gcs_service_pb2.GetClusterIdRequest"
_GCS_NODES_REQUEST = "ray.core.generated.gcs_service_pb2.GetAllNodeInfoRequest"
_WALK_PACKAGE = "ray._private.runtime_env.packaging._dir_travel"
_GCS_ACCESSOR = "ray._private.state.state._connect_and_get_accessor"
_PLACEMENT_GROUP = "ray.core.generated.gcs_pb2.PlacementGroupTableData"
_ACTOR = "ray.core.generated.gcs_pb2.ActorTableData"
_JOB = "ray.core.generated.gcs_pb2.JobTableData"
_MAX_PACKAGE_BYTES = "ray._private.runtime_env.packaging.GCS_STORAGE_MAX_SIZE"
_FREE_RESOURCES = "ray._private.state.available_resources_per_node"
_HEAD_RESOURCE = "ray._common.constants.HEAD_NODE_RESOURCE_NAME"
_SET_TITLE = "ray._raylet.setproctitle"
_JOB_INFO_KEY = "ray.dashboard.modules.job.common.JobInfoStorageClient.JOB_DATA_KEY"
_JOB_INFO_NAMESPACE = "ray._private.ray_constants.KV_NAMESPACE_JOB"
_READ_VALUE = "ray.experimental.internal_kv._internal_kv_get"
_WRITE_VALUE = "ray.experimental.internal_kv._internal_kv_put"
_GCS_CLIENT = "ray._raylet.GcsClient"
_NEVER_PACKAGED = "ray._private.ray_constants.get_runtime_env_default_excludes"
_CREATE_PACKAGE = "ray._private.runtime_env.packaging.create_package"
_PACKAGE_URI = "ray._private.runtime_env.packaging.get_uri_for_package"
_PACKAGE_EXISTS = "ray._private.runtime_env.packaging.package_exists"
_PIN_PACKAGE = "ray._private.runtime_env.packaging.pin_runtime_env_uri"
_UPLOAD_PACKAGE = "ray._private.runtime_env.packaging.upload_package_to_gcs"

INTERNALS = (
    _SET_SIGTERM_HANDLER,
    _POPEN,
    _PRINT,
    _NODE,
    _DEAD_PROCESSES,
    _DRAINING_NODES,
    _READ_ADDRESS,
    _FIND_NODE_IDS,
    _RESOLVE_LOCALHOST,
    _RAY_CLIENT,
    _USE_TOKEN,
    _OPEN_CHANNEL,
    _GCS_STUB,
    _GCS_REQUEST,
    _GCS_NODES_REQUEST,
    _WALK_PACKAGE,
    _MAX_PACKAGE_BYTES,
    _HEAD_RESOURCE,
    _FREE_RESOURCES,
    _GCS_ACCESSOR,
    _PLACEMENT_GROUP,
    _ACTOR,
    _JOB,
    _SET_TITLE,
    _JOB_INFO_KEY,
    _JOB_INFO_NAMESPACE,
    _READ_VALUE,
    _WRITE_VALUE,
    _GCS_CLIENT,
    _NEVER_PACKAGED,
    _CREATE_PACKAGE,
    _PACKAGE_URI,
    _PACKAGE_EXISTS,
    _PIN_PACKAGE,
    _UPLOAD_PACKAGE,
)
"""The dotted names of all private objects that this module uses."""

NODE_HAS_DIED = "its node has died"
"""Part of the message by which the GCS server explains the death of an actor. The exception has no field for it."""

PIN_S = 600
"""How long the cluster keeps an uploaded package that no job refers to."""

_SIGNALS_OF_RAY = (
    signal.SIGTERM,
    signal.SIGSEGV,
    signal.SIGILL,
    signal.SIGFPE,
    signal.SIGABRT,
    signal.SIGBUS,
    signal.SIGTRAP,
)
"""Signals for which Ray sets handlers below Python, which print the stack and abort."""

_SIGACTION_SIZE = 512
"""Bytes; more than a ``struct sigaction`` of any platform has."""


class MovedError(RuntimeError):
    """The installed Ray no longer has a private name that this module uses."""

    def __init__(self, name: str):
        super().__init__(f"Ray {ray.__version__} moved {name} (checked with {CHECKED_VERSION}); see compat/ray.py")


def find_internal(name: str) -> Any:
    """Return Ray's private object with the dotted ``name``.

    Raises:
        MovedError: the installed Ray has no such object.
    """
    owner, attribute = _owner(name)
    try:
        return getattr(owner, attribute)
    except AttributeError as e:
        raise MovedError(name) from e


@contextlib.contextmanager
def signals_kept_from_ray() -> Iterator[None]:
    """Start Ray in this context to keep the handling of SIGINT and SIGTERM with the caller.

    Ray then leaves the handlers of signals alone, and each process that it starts gets its own process group, so a
    signal to the caller's group (Ctrl-C, ``timeout``) reaches only the caller.
    """
    popen = functools.partial(find_internal(_POPEN), process_group=0)
    has_alarm = signal.getitimer(signal.ITIMER_REAL) != (0.0, 0.0)
    with _replaced(_SET_SIGTERM_HANDLER, lambda handler: None), _replaced(_POPEN, popen), _signal_actions_kept():
        try:
            yield
        finally:
            if not has_alarm:  # Ray's handler aborts the process three seconds after a SIGTERM
                signal.alarm(0)


@contextlib.contextmanager
def process_kept_from_ray() -> Iterator[None]:
    """Start and shut down Ray in this context; the level of Ray's logger and ``faulthandler`` are then as before."""
    logger = logging.getLogger("ray")
    level, had_faulthandler = logger.level, faulthandler.is_enabled()
    with _signal_actions_kept():
        try:
            yield
        finally:
            logger.setLevel(level)
            if not had_faulthandler:
                faulthandler.disable()


@contextlib.contextmanager
def _signal_actions_kept() -> Iterator[None]:
    """Restore on exit what the signals of Ray do below Python. Unlike ``signal.signal``, this works in every thread."""
    libc = ctypes.CDLL(None)
    actions = {number: ctypes.create_string_buffer(_SIGACTION_SIZE) for number in _SIGNALS_OF_RAY}
    for number, action in actions.items():
        libc.sigaction(number, None, action)
    try:
        yield
    finally:
        for number, action in actions.items():
            libc.sigaction(number, action, None)


def raylet_messages_muted() -> contextlib.AbstractContextManager[None]:
    """Keep Ray's own messages about lost workers and nodes off the console; the run reports them itself."""
    return _replaced(_PRINT, lambda *_, **__: None)


@contextlib.contextmanager
def environment_defaults(values: Mapping[str, str]) -> Iterator[None]:
    """Set the variables that are not set yet, for Ray to read as it starts; remove them again on exit."""
    added = [name for name in values if name not in os.environ]
    os.environ.update({name: values[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def own_ray_has_died() -> bool:
    """Return whether this process started a Ray whose GCS server or raylet is dead; no call to it would return."""
    node = find_internal(_NODE)
    return node is not None and any(kind in ("gcs_server", "raylet") for kind, _ in node.dead_processes())


def is_own_ray() -> bool:
    """Return whether this process started the Ray that it is connected to."""
    node = find_internal(_NODE)
    return node is not None and bool(node.head)


def on_head() -> dict[str, float]:
    """Return the resources to ask for so that an actor is placed on the head node."""
    return {find_internal(_HEAD_RESOURCE): 0.001}


def died_with_node(error: ray.exceptions.RayError) -> bool:
    """Return whether ``error`` reports a worker that died because its node did."""
    if isinstance(error, ray.exceptions.NodeDiedError):
        return True
    return isinstance(error, ray.exceptions.ActorDiedError) and NODE_HAS_DIED in str(error)


def draining_nodes() -> Collection[str]:
    """Return the ids of the nodes that have been told to drain. Blocks while the GCS server does not answer."""
    ids: Collection[str] = find_internal(_DRAINING_NODES)()
    return ids


@dataclass(frozen=True, kw_only=True)
class PlacedBundle:
    """Resources that a placement group has reserved on a node; ``placed_at`` is in seconds since the epoch."""

    group: str
    node_id: str
    resources: Mapping[str, float]
    placed_at: float


def placed_bundles() -> Sequence[PlacedBundle]:
    """Return all reserved bundles of the cluster. The public table of placement groups has no times."""
    groups = map(find_internal(_PLACEMENT_GROUP).FromString, find_internal(_GCS_ACCESSOR)().get_placement_group_table())
    return [
        PlacedBundle(
            group=group.name,
            node_id=bundle.node_id.hex(),
            resources=dict(bundle.unit_resources),
            placed_at=group.placement_group_final_bundle_placement_timestamp_ms / 1e3,
        )
        for group in groups
        if group.state == group.CREATED
        for bundle in group.bundles
    ]


@dataclass(frozen=True, kw_only=True)
class PlacedActor:
    """Resources that an actor outside of placement groups holds on a node.

    Args:
        job: the submission id of its Ray job, or the job's id and the process of its driver.
        node_id: the node.
        resources: what it holds there.
        started_at: seconds since the epoch.
    """

    job: str
    node_id: str
    resources: Mapping[str, float]
    started_at: float


def placed_actors() -> Sequence[PlacedActor]:
    """Return the living actors that hold resources of their own, from the GCS server.

    Ray's public state API asks the dashboard, which a cluster may lack.
    """
    accessor = find_internal(_GCS_ACCESSOR)()
    actors = map(find_internal(_ACTOR).FromString, accessor.get_actor_table(None, "ALIVE"))
    holders = [actor for actor in actors if actor.required_resources and not actor.placement_group_id]
    if not holders:
        return []
    table = accessor.get_job_table(skip_submission_job_info_field=True, skip_is_running_tasks_field=True)
    jobs = {job.job_id: _describe_job(job) for job in map(find_internal(_JOB).FromString, table)}
    return [
        PlacedActor(
            job=jobs.get(actor.job_id, actor.job_id.hex()),
            node_id=actor.node_id.hex(),
            resources=dict(actor.required_resources),
            started_at=actor.start_time / 1e3,
        )
        for actor in holders
    ]


def _describe_job(job: Any) -> str:
    """Return what identifies a job to a user. Its entrypoint is left out, which may contain secrets."""
    submission_id: str = job.config.metadata.get("job_submission_id", "")
    return submission_id or f"{job.job_id.hex()} (pid {job.driver_pid} on {job.driver_address.ip_address})"


def free_resources() -> Mapping[str, Mapping[str, float]]:
    """Return the free resources of each living node by its id, as the GCS server has heard of them last."""
    resources: Mapping[str, Mapping[str, float]] = find_internal(_FREE_RESOURCES)()
    return resources


def is_ray_client() -> bool:
    """Return whether this process is connected to a cluster through Ray Client."""
    return bool(find_internal(_RAY_CLIENT).is_connected())


def address_of_ray_start() -> str | None:
    """Return ``host:port`` of the Ray that ``ray start`` left running on this machine; None if there is none."""
    address: str | None = find_internal(_READ_ADDRESS)(None)
    return address


@contextlib.contextmanager
def pickled_by_value(module: ModuleType) -> Iterator[None]:
    """Send the functions of ``module`` to other processes with their code, which need not be able to import it."""
    ray.cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        ray.cloudpickle.unregister_pickle_by_value(module)


@contextlib.contextmanager
def ray_logs_errors_only() -> Iterator[None]:
    """Mute what Ray's Python code logs in this context, except errors."""
    logger = logging.getLogger("ray")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def use_token_of_user() -> None:
    """Send the user's Ray token, if one is stored, to the Ray that this process talks to, as ``ray.init`` does.

    Ray records this in ``RAY_AUTH_MODE``, and keeps it there.
    """
    with ray_logs_errors_only():
        find_internal(_USE_TOKEN)(warn_if_disabled=False)


def probe_gcs(address: str, *, timeout_s: float, with_token: bool = True) -> str | None:
    """Call a GCS server.

    Args:
        address: ``host:port`` of the server.
        timeout_s: how long to wait for the answer.
        with_token: present the token of this process, if it has one; otherwise the call does not use TLS either.

    Returns:
        None if it answers, or else the gRPC status in lower case: ``unavailable``, ``unauthenticated``, ...
    """
    request = find_internal(_GCS_REQUEST)()
    channel = find_internal(_OPEN_CHANNEL)(address) if with_token else grpc.insecure_channel(address)
    stub = find_internal(_GCS_STUB)(channel)
    try:
        stub.GetClusterId(request, timeout=timeout_s)
    except grpc.RpcError as e:
        status: str = e.code().name.lower()
        return status
    return None


def is_node_of(address: str, *, timeout_s: float) -> bool:
    """Return whether a raylet of the cluster runs on this machine; ``address`` is that of its GCS server.

    ``ray.init`` waits a minute for one. True if the server does not answer.
    """
    here = find_internal(_FIND_NODE_IDS)()
    stub = find_internal(_GCS_STUB)(find_internal(_OPEN_CHANNEL)(address))
    try:
        nodes = stub.GetAllNodeInfo(find_internal(_GCS_NODES_REQUEST)(), timeout=timeout_s).node_info_list
    except grpc.RpcError:
        return True
    return any(node.node_id.hex() in here for node in nodes)


def loopback_accepted() -> contextlib.AbstractContextManager[None]:
    """Let Ray bind a node that starts in this context to a loopback address.

    Otherwise it takes an address to which the hostname resolves, which may not be on this machine.
    """
    return _replaced(_RESOLVE_LOCALHOST, lambda host: host)


def packaged_files(directory: Path) -> list[tuple[Path, int]]:
    """Return the files of a working directory that would travel to a cluster, relative to it, with their sizes."""
    files: list[tuple[Path, int]] = []

    def note(path: Path) -> None:
        if path.is_file():
            files.append((path.relative_to(directory), path.stat().st_size))

    with ray_logs_errors_only():
        find_internal(_WALK_PACKAGE)(directory, [], note, include_gitignore=_respects_gitignore())
    return files


def make_package(source: Path, package: Path, *, with_name: bool = False) -> Path:
    """Zip a directory, without the files that ``.rayignore`` and ``.gitignore`` name, or a single file.

    ``with_name``: the paths in the zip begin with the name of the directory. Returns ``package``.
    """
    with ray_logs_errors_only():
        find_internal(_CREATE_PACKAGE)(
            str(source),
            package,
            include_gitignore=_respects_gitignore(),
            include_parent_dir=with_name,
            excludes=find_internal(_NEVER_PACKAGED)(),
        )
    return package


def upload_package(package: Path) -> str:
    """Bring a zip or a wheel to the connected cluster if it is not there, and keep it there for :data:`PIN_S`.

    Returns:
        The URI, for a runtime environment.
    """
    uri: str = find_internal(_PACKAGE_URI)(package)
    with ray_logs_errors_only():
        find_internal(_PIN_PACKAGE)(uri, expiration_s=PIN_S)
        if not find_internal(_PACKAGE_EXISTS)(uri):
            find_internal(_UPLOAD_PACKAGE)(uri, package.read_bytes())
    return uri


def _respects_gitignore() -> bool:
    return os.environ.get("RAY_RUNTIME_ENV_IGNORE_GITIGNORE", "0") != "1"


def max_package_bytes() -> int:
    """Return the size of the largest working directory that Ray sends to a cluster."""
    return int(find_internal(_MAX_PACKAGE_BYTES))


def keep_process_title(title: str) -> None:
    """Give this worker process the title ``ray::<title>`` for ``ps`` and the dashboard; Ray no longer changes it."""
    _take_title()(f"ray::{title}")


@functools.cache
def _take_title() -> Callable[[str], None]:
    """Return the function with which Ray would set the title at each call, and take it away from Ray."""
    set_title: Callable[[str], None] = find_internal(_SET_TITLE)
    owner, attribute = _owner(_SET_TITLE)
    setattr(owner, attribute, lambda title: None)
    return set_title


def add_job_metadata(values: Mapping[str, str]) -> None:
    """Add to what the dashboard and ``ray job list`` show about the submitted job of this process, if it is one.

    Ray offers this only for the time of the submission. Nothing is added if the process has embedded a Ray of its own,
    which does not know the job.
    """
    if (job_id := submission_id()) is None or is_own_ray():
        return
    key = find_internal(_JOB_INFO_KEY).format(job_id=job_id).encode()
    namespace = find_internal(_JOB_INFO_NAMESPACE)
    stored = find_internal(_READ_VALUE)(key, namespace=namespace)
    if stored is None:
        return
    info = json.loads(stored)
    info["metadata"] = {**(info.get("metadata") or {}), **values}
    find_internal(_WRITE_VALUE)(key, json.dumps(info).encode(), overwrite=True, namespace=namespace)


def put_cluster_value(namespace: str, key: str, value: bytes) -> None:
    """Store a value in the GCS server of the connected cluster, which keeps it as long as it lives."""
    find_internal(_WRITE_VALUE)(key, value, overwrite=True, namespace=namespace)


def cluster_values(address: str, namespace: str, prefix: str, *, timeout_s: float) -> list[bytes]:
    """Return the values whose keys begin with ``prefix``, in the order of the keys.

    This process need not be connected to the cluster; ``address`` is ``host:port`` of its GCS server.
    """
    client = find_internal(_GCS_CLIENT)(address=address)
    keys: list[bytes] = sorted(client.internal_kv_keys(prefix.encode(), namespace.encode(), timeout_s))
    values: dict[bytes, bytes] = client.internal_kv_multi_get(keys, namespace.encode(), timeout_s) if keys else {}
    return [values[key] for key in keys if key in values]


def _owner(name: str) -> tuple[Any, str]:
    """The object that holds the last part of a dotted ``name``, and that part."""
    parts, attribute = name.split(".")[:-1], name.rpartition(".")[2]
    for end in range(len(parts), 0, -1):
        try:
            owner: Any = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        try:
            for part in parts[end:]:
                owner = getattr(owner, part)
        except AttributeError as e:
            raise MovedError(name) from e
        return owner, attribute
    raise MovedError(name)


@contextlib.contextmanager
def _replaced(name: str, value: Any) -> Iterator[None]:
    original = find_internal(name)
    owner, attribute = _owner(name)
    setattr(owner, attribute, value)
    try:
        yield
    finally:
        setattr(owner, attribute, original)

"""The private objects of Ray that this package uses, written against Ray 2.60.0.

Ray may move them in any release. Each is looked up at the moment of its use, so that an error names the one that moved,
and ``tests/unit/compat/test_compat_ray.py`` checks all of :class:`Internal` against the installed Ray.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from enum import StrEnum
from typing import Any

import ray

CHECKED_VERSION = "2.60.0"


class Internal(StrEnum):
    """The dotted names of all private objects that this package uses."""

    SET_SIGTERM_HANDLER = "ray._private.utils.set_sigterm_handler"
    POPEN = "ray._private.services.ConsolePopen"
    NODE_CLASS = "ray._private.node.Node"
    CONNECT = "ray._private.worker.connect"
    GET_NODE = "ray._private.services.get_node"
    START_API_SERVER = "ray._private.node.Node.start_api_server"
    START_AUTOSCALER = "ray._private.node.Node.start_monitor"
    START_LOG_MONITOR = "ray._private.node.Node.start_log_monitor"
    PYTHON_COMMAND = "ray._private.services._build_python_executable_command_memory_profileable"
    DASHBOARD_AGENT = "ray._private.ray_constants.PROCESS_TYPE_DASHBOARD_AGENT"
    FIND_DASHBOARD_ERROR = "ray._private.utils.get_dashboard_dependency_error"
    PRINT = "ray._private.worker.print_to_stdstream"
    CONFIG = "ray._raylet.Config"
    NODE = "ray._private.worker._global_node"
    DEAD_PROCESSES = "ray._private.node.Node.dead_processes"
    DRAINING_NODES = "ray._private.state.state.get_draining_nodes"
    SESSION_FOLDER = "ray._common.utils.get_default_ray_temp_dir"
    READ_ADDRESS = "ray._private.services.find_bootstrap_address"
    IS_RAYLET = "ray._private.services._is_raylet_process"
    TOKENS = "ray._raylet.AuthenticationTokenLoader"
    FIND_IN_RAYLETS = "ray._private.services._find_address_from_flag"
    RESOLVE_LOCALHOST = "ray._private.services.resolve_ip_for_localhost"
    RAY_CLIENT = "ray.util.client.ray"
    USE_TOKEN = "ray._private.authentication.authentication_token_setup.maybe_enable_token_auth_if_token_available"
    OPEN_CHANNEL = "ray._private.grpc_utils.init_grpc_channel"
    GCS_STUB = "ray.core.generated.gcs_service_pb2_grpc.NodeInfoGcsServiceStub"
    GCS_REQUEST = "ray.core.generated.gcs_service_pb2.GetClusterIdRequest"
    GCS_NODES_REQUEST = "ray.core.generated.gcs_service_pb2.GetAllNodeInfoRequest"
    WALK_PACKAGE = "ray._private.runtime_env.packaging._dir_travel"
    GCS_STATE = "ray._private.state.state"
    GCS_ACCESSOR = "ray._private.state.state._connect_and_get_accessor"
    PLACEMENT_GROUP = "ray.core.generated.gcs_pb2.PlacementGroupTableData"
    ACTOR = "ray.core.generated.gcs_pb2.ActorTableData"
    JOB = "ray.core.generated.gcs_pb2.JobTableData"
    MAX_PACKAGE_BYTES = "ray._private.runtime_env.packaging.GCS_STORAGE_MAX_SIZE"
    MAX_UPLOAD_BYTES = "ray._private.ray_constants.DASHBOARD_CLIENT_MAX_SIZE"
    FREE_RESOURCES = "ray._private.state.available_resources_per_node"
    HEAD_RESOURCE = "ray._common.constants.HEAD_NODE_RESOURCE_NAME"
    SET_TITLE = "ray._raylet.setproctitle"
    JOB_INFO_KEY = "ray.dashboard.modules.job.common.JobInfoStorageClient.JOB_DATA_KEY"
    JOB_INFO_NAMESPACE = "ray._private.ray_constants.KV_NAMESPACE_JOB"
    READ_VALUE = "ray.experimental.internal_kv._internal_kv_get"
    WRITE_VALUE = "ray.experimental.internal_kv._internal_kv_put"
    GCS_CLIENT = "ray._raylet.GcsClient"
    NEVER_PACKAGED = "ray._private.ray_constants.get_runtime_env_default_excludes"
    MATCH_EXCLUDED = "ray._private.runtime_env.packaging._get_excludes"
    UPLOAD_TO_DASHBOARD = "ray.dashboard.modules.dashboard_sdk.SubmissionClient._upload_package_if_needed"
    CREATE_PACKAGE = "ray._private.runtime_env.packaging.create_package"
    PACKAGE_URI = "ray._private.runtime_env.packaging.get_uri_for_package"
    PACKAGE_EXISTS = "ray._private.runtime_env.packaging.package_exists"
    PIN_PACKAGE = "ray._private.runtime_env.packaging.pin_runtime_env_uri"
    WORKER = "ray._private.worker.global_worker"
    STATE = "ray._private.state.state"
    STARTS_BY_ITSELF = "ray._private.auto_init_hook.enable_auto_connect"
    LOGS_TO_DRIVER = "ray._private.ray_constants.RAY_LOG_TO_DRIVER"
    UPLOAD_PACKAGE = "ray._private.runtime_env.packaging.upload_package_to_gcs"


class MovedError(RuntimeError):
    """The installed Ray no longer has a private name that this package uses."""

    def __init__(self, name: str):
        super().__init__(f"Ray {ray.__version__} moved {name} (checked with {CHECKED_VERSION}); see compat/ray")


def find_internal(name: str) -> Any:
    """Return Ray's private object with the dotted ``name``.

    Raises:
        MovedError: the installed Ray has no such object.
    """
    owner, attribute = owner_of(name)
    try:
        return getattr(owner, attribute)
    except AttributeError as e:
        raise MovedError(name) from e


def owner_of(name: str) -> tuple[Any, str]:
    """Return the object that holds the last part of a dotted ``name``, and that part."""
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
def replaced(name: str, value: Any) -> Iterator[None]:
    """Put ``value`` in the place of Ray's private object in this context."""
    original = find_internal(name)
    owner, attribute = owner_of(name)
    setattr(owner, attribute, value)
    try:
        yield
    finally:
        setattr(owner, attribute, original)

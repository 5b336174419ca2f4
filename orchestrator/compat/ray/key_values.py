"""The key-value store of the GCS server, in which Ray also keeps the metadata of submitted jobs."""

from __future__ import annotations

import json
from collections.abc import Mapping

from orchestrator.compat.ray.connection import is_own_ray
from orchestrator.compat.ray.internals import Internal, find_internal
from orchestrator.compat.ray_job import submission_id


def add_job_metadata(values: Mapping[str, str]) -> None:
    """Add to what the dashboard and ``ray job list`` show about the submitted job of this process, if it is one.

    Ray offers this only for the time of the submission. Nothing is added if the process has embedded a Ray of its own,
    which does not know the job.
    """
    if (job_id := submission_id()) is None or is_own_ray():
        return
    key = find_internal(Internal.JOB_INFO_KEY).format(job_id=job_id).encode()
    namespace = find_internal(Internal.JOB_INFO_NAMESPACE)
    stored = find_internal(Internal.READ_VALUE)(key, namespace=namespace)
    if stored is None:
        return
    info = json.loads(stored)
    info["metadata"] = {**(info.get("metadata") or {}), **values}
    find_internal(Internal.WRITE_VALUE)(key, json.dumps(info).encode(), overwrite=True, namespace=namespace)


def put_cluster_value(namespace: str, key: str, value: bytes) -> None:
    """Store a value in the GCS server of the connected cluster, which keeps it as long as it lives."""
    find_internal(Internal.WRITE_VALUE)(key, value, overwrite=True, namespace=namespace)


def cluster_values(address: str, namespace: str, prefix: str, *, timeout_s: float) -> list[bytes]:
    """Return the values whose keys begin with ``prefix``, in the order of the keys.

    This process need not be connected to the cluster; ``address`` is ``host:port`` of its GCS server.
    """
    client = find_internal(Internal.GCS_CLIENT)(address=address)
    keys: list[bytes] = sorted(client.internal_kv_keys(prefix.encode(), namespace.encode(), timeout_s))
    values: dict[bytes, bytes] = client.internal_kv_multi_get(keys, namespace.encode(), timeout_s) if keys else {}
    return [values[key] for key in keys if key in values]

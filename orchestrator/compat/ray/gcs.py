"""What the GCS server of a cluster knows: its nodes, what runs on them, and the values that it keeps.

Ray also keeps the metadata of submitted jobs among these values."""

from __future__ import annotations

import contextlib
import functools
import json
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import ray
import ray.exceptions
from ray.util.placement_group import PlacementGroup, get_placement_group, placement_group

from orchestrator.compat.ray.connection import is_own_ray, known_nodes
from orchestrator.compat.ray.internals import Internal, find_internal
from orchestrator.compat.ray_job import submission_id

T = TypeVar("T")

ANSWER_TIMEOUT_S = 10.0
"""After this, an answer of the GCS server counts as lost; a busy one takes less."""
ATTEMPTS = 6
"""How often the GCS server is asked."""
CREATION_UNANSWERED = "timeout in creating the placement group"
"""Part of the message of the exception, which has no type of its own."""
NODE_HAS_DIED = "its node has died"
"""Part of the message by which the GCS server explains the death of an actor. The exception has no field for it."""


def on_head() -> dict[str, float]:
    """Return the resources to ask for so that an actor is placed on the head node."""
    return {find_internal(Internal.HEAD_RESOURCE): 0.001}


def died_with_node(error: ray.exceptions.RayError) -> bool:
    """Return whether ``error`` reports a worker that died because its node did."""
    if isinstance(error, ray.exceptions.NodeDiedError):
        return True
    return isinstance(error, ray.exceptions.ActorDiedError) and NODE_HAS_DIED in str(error)


def draining_nodes() -> Collection[str]:
    """Return the ids of the nodes that have been told to drain. Blocks while the GCS server does not answer."""
    ids: Collection[str] = find_internal(Internal.DRAINING_NODES)()
    return ids


def create_placement_group(bundles: list[dict[str, float]], *, name: str, **options: Any) -> PlacementGroup:
    """Create a placement group with a name that no other one of this driver has.

    Ray waits a minute for an answer of the GCS server. If that is lost, the group may exist all the same.
    """
    create: Callable[[], PlacementGroup] = functools.partial(placement_group, bundles, name=name, **options)
    find: Callable[[], PlacementGroup] = functools.partial(get_placement_group, name)
    try:
        return create()
    except Exception as e:
        if CREATION_UNANSWERED not in str(e):
            raise
    with contextlib.suppress(ValueError):  # none has this name
        return _answer(find)
    return create()


def all_nodes() -> Sequence[Any]:
    """Return all nodes that the cluster has had, as :func:`known_nodes` does.

    ``ray.nodes()`` has no limit of time, and its answer was lost several times.

    Raises:
        ConnectionError: the GCS server does not answer.
    """
    address = ray.get_runtime_context().gcs_address
    return known_nodes(address, timeout_s=ANSWER_TIMEOUT_S * ATTEMPTS, outlives=True)


def total_resources() -> Mapping[str, Mapping[str, float]]:
    """Return the resources of each living node by its id."""
    return {node["NodeID"]: node["Resources"] for node in _answer(ray.nodes) if node["Alive"]}


def free_resources() -> Mapping[str, Mapping[str, float]]:
    """Return the free resources of each living node by its id, as the GCS server has heard of them last."""
    resources: Mapping[str, Mapping[str, float]] = _answer(find_internal(Internal.FREE_RESOURCES))
    return resources


@dataclass(frozen=True, kw_only=True)
class PlacedBundle:
    """Resources that a placement group has reserved on a node; ``placed_at`` is in seconds since the epoch."""

    group: str
    node_id: str
    resources: Mapping[str, float]
    placed_at: float


def placed_bundles() -> Sequence[PlacedBundle]:
    """Return all reserved bundles of the cluster. The public table of placement groups has no times."""
    groups = map(
        find_internal(Internal.PLACEMENT_GROUP).FromString,
        _answer(lambda: find_internal(Internal.GCS_ACCESSOR)().get_placement_group_table()),
    )
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

    Attributes:
        job: the submission id of its Ray job, or the job's id and the process of its driver.
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
    accessor = find_internal(Internal.GCS_ACCESSOR)
    table = _answer(lambda: accessor().get_actor_table(None, "ALIVE"))
    actors = map(find_internal(Internal.ACTOR).FromString, table)
    holders = [actor for actor in actors if actor.required_resources and not actor.placement_group_id]
    if not holders:
        return []
    table = _answer(
        lambda: accessor().get_job_table(skip_submission_job_info_field=True, skip_is_running_tasks_field=True)
    )
    jobs = {job.job_id: _describe_job(job) for job in map(find_internal(Internal.JOB).FromString, table)}
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


def _answer(ask: Callable[[], T]) -> T:
    """Return what ``ask`` returns. If that takes long, ask again with another client of the GCS server.

    Ray waits for an answer without a limit. Ray 2.60 has lost answers of an idle GCS server, and once two in a row.

    Raises:
        ConnectionError: no answer has come.
    """
    for _ in range(ATTEMPTS):
        answer: Future[T] = Future()
        threading.Thread(target=_work, args=(ask, answer), name="ask-gcs", daemon=True).start()
        with contextlib.suppress(TimeoutError):
            return answer.result(ANSWER_TIMEOUT_S)
        find_internal(Internal.GCS_STATE)._global_state_accessor = None
    raise ConnectionError(
        f"Ray's GCS server has not answered {ATTEMPTS} questions in {ANSWER_TIMEOUT_S * ATTEMPTS:g} s; see "
        "`ray status`, and start the run again"
    )


def _work(ask: Callable[[], T], answer: Future[T]) -> None:
    try:
        answer.set_result(ask())
    except Exception as e:
        answer.set_exception(e)


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

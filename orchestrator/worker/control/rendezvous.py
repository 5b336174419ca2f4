"""The process group of one generation: store, network interface, backend, timeouts, teardown."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from orchestrator.compat.backends import nccl_backend
from orchestrator.compat.enqueue_gate import GATE, guard_gpus
from orchestrator.compat.process_groups import abort_process_groups, restart_group_numbers
from orchestrator.compat.resolver import without_name_servers
from orchestrator.protocol.messages import Assignment
from orchestrator.worker.control.control import PeersMissingError, StepGate
from orchestrator.worker.process import interfaces
from orchestrator.worker.process.nccl_variables import nccl_variables

_JOINED, _BUILT = "joined", "built"
POLL_S = 0.5
"""The interval at which a waiting rank checks whether to give up."""
ENQUEUE_TIMEOUT_S = 1.0
"""How long an abort waits for threads that enqueue an operation. That takes some microseconds unless it blocks."""


def open_store(host: str, *, timeout_s: float) -> dist.TCPStore:
    """Open the store of a generation in this process, on a free port of the address ``host``.

    By default torch listens on all interfaces, and any process that can connect to the store can read and change its
    contents.
    """
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    listener = socket.create_server((host, 0), family=family)
    with without_name_servers():
        return dist.TCPStore(
            host,
            listener.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
            master_listen_fd=listener.detach(),
        )


def join(assignment: Assignment, *, store: dist.TCPStore | None, gate: StepGate | None = None) -> dist.TCPStore:
    """Wait until all ranks of a generation are there.

    Args:
        assignment: the generation, and the rank in it.
        store: the store, on the rank that has opened it; None on the others, which connect to it.
        gate: tells a waiting rank that the generation has ended; None if the rank waits until the timeout.

    Returns:
        The store. Keep it as long as the group.

    Raises:
        PeersMissingError: ranks did not join in time; the message names them.
        AbandonedError: the driver has ended the generation.
    """
    config = assignment.config.cluster
    if store is None:
        with without_name_servers():
            store = dist.TCPStore(
                assignment.store_host,
                assignment.store_port,
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=config.rendezvous_timeout_s),
            )
    try:
        _meet(_JOINED, assignment, store, gate, timeout_s=config.rendezvous_timeout_s)
    except _MissingError as e:
        raise PeersMissingError(
            f"ranks {e.ranks} did not join within {config.rendezvous_timeout_s:g} s; "
            "see their logs, or raise cluster.rendezvous_timeout_s"
        ) from e
    return store


def wait_until_built(assignment: Assignment, store: dist.TCPStore, gate: StepGate) -> None:
    """Wait until all ranks have what they need for their first collective operation, whose timeout is shorter.

    Raises:
        PeersMissingError: ranks did not build their model in time; the message names them.
        AbandonedError: the driver has ended the generation.
    """
    timeout_s = assignment.config.recovery.build_max_s
    try:
        _meet(_BUILT, assignment, store, gate, timeout_s=timeout_s)
    except _MissingError as e:
        raise PeersMissingError(
            f"ranks {e.ranks} were not ready to train within {timeout_s:g} s; see their logs, or raise "
            "recovery.build_max_s"
        ) from e


def connect(assignment: Assignment, store: dist.TCPStore, *, node_ip: str, device: torch.device) -> None:
    """Form the default process group of the ranks that have joined.

    ``node_ip``: the address by which Ray knows this node.
    """
    if assignment.backend == "nccl":
        os.environ |= nccl_variables(os.environ, recovers=assignment.config.recovery.max_failures > 0)
        guard_gpus()
    GATE.open()
    interfaces.choose_for(assignment, node_ip=node_ip)
    try:
        with without_name_servers():
            dist.init_process_group(
                assignment.backend,
                store=_store_of_generation(store, assignment),
                rank=assignment.global_rank,
                world_size=assignment.plan.world_size,
                timeout=timedelta(seconds=assignment.config.cluster.collective_timeout_s),
                device_id=device if device.type == "cuda" else None,
            )
    except BaseException:
        restart_group_numbers()
        raise
    if assignment.backend == "nccl":
        assert dist.group.WORLD is not None
        nccl_backend(dist.group.WORLD)  # an unknown one is refused before it would have to be aborted


def leave() -> None:
    """Destroy the process groups if there are any. Under NCCL this waits for the other ranks."""
    if dist.is_initialized():
        dist.destroy_process_group()


def abort() -> list[dist.ProcessGroup]:
    """Abort the process groups, as :func:`abort_process_groups` does; there may be none, and they may be broken.

    With NCCL, no thread enqueues anything afterwards, or while they are aborted.
    """
    if not dist.is_initialized():
        return []
    if not GATE.close(timeout_s=ENQUEUE_TIMEOUT_S):
        print("an operation of a process group is still being enqueued; it is aborted all the same", file=sys.stderr)
    return abort_process_groups()


def _store_of_generation(store: dist.TCPStore, assignment: Assignment) -> dist.PrefixStore:
    return dist.PrefixStore(f"generation-{assignment.generation}", store)


class _MissingError(Exception):
    """These ``ranks`` have not come to a meeting."""

    def __init__(self, ranks: Sequence[int]):
        super().__init__(ranks)
        self.ranks = ranks


def _meet(place: str, assignment: Assignment, store: dist.TCPStore, gate: StepGate | None, *, timeout_s: float) -> None:
    """Wait until every rank has come to ``place``. Each waits for a single key, which the last one sets.

    Raises:
        _MissingError: some ranks did not come in time.
        AbandonedError: the driver has ended the generation.
    """
    own, world_size = _store_of_generation(store, assignment), assignment.plan.world_size
    own.set(f"{place}-{assignment.global_rank}", "1")
    if own.add(place, 1) == world_size:
        own.set(f"all-{place}", "1")
    deadline = time.monotonic() + timeout_s
    while True:
        if gate is not None:
            gate.check(assignment.generation)
        try:
            return own.wait([f"all-{place}"], timedelta(seconds=min(POLL_S, timeout_s)))
        except dist.DistStoreError as e:
            if time.monotonic() >= deadline:
                raise _MissingError([r for r in range(world_size) if not own.check([f"{place}-{r}"])]) from e

"""One generation of the process group: store, interface, backend, timeouts, teardown."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist

from orchestrator.protocol.messages import Assignment

WAIT_S = 0.5
"""Between two looks at whether to go on waiting."""


def open_store(host: str, *, timeout_s: float) -> dist.TCPStore:
    """The store of a run, on a port that the system chose and this process keeps."""
    return dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


def join(
    assignment: Assignment,
    *,
    node_ip: str,
    store: dist.TCPStore | None,
    device: torch.device,
    check: Callable[[], None] = lambda: None,
) -> dist.TCPStore:
    """Form the default process group; returns the store, which must be kept as long as the group.

    ``store`` is the rank's own one if it is the rank that opened it. ``check()`` is called while it waits for the
    others, and may raise to give up.

    Raises:
        TimeoutError: naming the ranks that did not come.
    """
    config, world_size = assignment.config.cluster, assignment.plan.world_size
    join_timeout = timedelta(seconds=config.rendezvous_timeout_s)
    if assignment.backend == "gloo":
        os.environ["GLOO_SOCKET_IFNAME"] = interface_of(node_ip)
    if store is None:
        store = dist.TCPStore(
            assignment.store_host,
            assignment.store_port,
            is_master=False,
            wait_for_workers=False,
            timeout=join_timeout,
        )
    own = dist.PrefixStore(f"generation-{assignment.generation}", store)
    own.set(f"joined-{assignment.global_rank}", "1")
    _wait_for_all(own, world_size, config.rendezvous_timeout_s, check)
    dist.init_process_group(
        assignment.backend,
        store=own,
        rank=assignment.global_rank,
        world_size=world_size,
        timeout=timedelta(seconds=config.collective_timeout_s),
        device_id=device if device.type == "cuda" else None,
    )
    return store


def leave() -> None:
    """Drop the process group, broken or not."""
    if dist.is_initialized():
        dist.destroy_process_group()


def interface_of(ip: str) -> str:
    """The network interface that owns ``ip``; gloo would otherwise take whatever the hostname
    resolves to, which on many machines is a loopback address that others cannot reach.

    Raises:
        LookupError: no interface has the address.
    """
    for name, addresses in psutil.net_if_addrs().items():
        if any(a.address == ip for a in addresses):
            return name
    raise LookupError(f"no network interface has the address {ip} by which Ray knows this node")


def _wait_for_all(store: dist.Store, world_size: int, timeout_s: float, check: Callable[[], None]) -> None:
    keys = [f"joined-{rank}" for rank in range(world_size)]
    deadline = time.monotonic() + timeout_s
    while True:
        check()
        try:
            return store.wait(keys, timedelta(seconds=min(WAIT_S, timeout_s)))
        except dist.DistStoreError as e:
            if time.monotonic() < deadline:
                continue
            missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
            raise TimeoutError(
                f"ranks {missing} did not join within {timeout_s:g} s; "
                "see their logs, or raise cluster.rendezvous_timeout_s"
            ) from e

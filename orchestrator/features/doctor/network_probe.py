"""The processes that measure an all-reduce across the nodes of a cluster."""

from __future__ import annotations

import functools
from datetime import timedelta

import torch
import torch.distributed as dist

from orchestrator.compat.resolver import without_name_servers
from orchestrator.strategies.measure.device import medians_ms
from orchestrator.worker.control.rendezvous import leave, open_store
from orchestrator.worker.process import network

SMALL_BYTES, LARGE_BYTES = 4 * 2**10, 16 * 2**20
RUNS = 8


class NetworkProbe:
    """One process of the measurement; it runs as an actor."""

    def __init__(self) -> None:
        self._store: dist.TCPStore | None = None

    def open_store(self, host: str, timeout_s: float) -> int:
        """Open the store of the group at the address ``host`` of this node; returns its port."""
        self._store = open_store(host, timeout_s=timeout_s)
        return self._store.port

    def measure(
        self, *, rank: int, world_size: int, store: tuple[str, int], address: str, on_gpu: bool, timeout_s: float
    ) -> tuple[float, float]:
        """Form the group, and return the median times of a small and a large all-reduce in milliseconds.

        Args:
            rank: of this process, of ``world_size``.
            store: host and port of the store, which rank 0 has opened.
            address: the IP address of the interface to use.
            on_gpu: whether to measure NCCL on the first GPU of this process, or gloo.
            timeout_s: how long to wait for the others.

        Raises:
            RuntimeError: the group was not formed, or an all-reduce failed.
        """
        network.choose(address, nccl=address)
        device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
        if on_gpu:
            torch.cuda.set_device(device)
        limit = timedelta(seconds=timeout_s)
        with without_name_servers():
            shared = self._store or dist.TCPStore(*store, is_master=False, wait_for_workers=False, timeout=limit)
            dist.init_process_group(
                "nccl" if on_gpu else "gloo",
                store=shared,
                rank=rank,
                world_size=world_size,
                timeout=limit,
                device_id=device if on_gpu else None,
            )
        try:
            tensors = [torch.zeros(size_bytes // 4, device=device) for size_bytes in (SMALL_BYTES, LARGE_BYTES)]
            calls = [functools.partial(dist.all_reduce, tensor) for tensor in tensors]
            small_ms, large_ms = medians_ms(calls, device, runs=RUNS)
            return small_ms, large_ms
        finally:
            leave()

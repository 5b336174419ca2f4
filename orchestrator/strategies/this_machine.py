"""The CPUs of this machine as a device for ``orchestrator plan``, with rates that are measured here."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from orchestrator.planning.memory import GIB
from orchestrator.prediction.cost import Stack
from orchestrator.prediction.devices import CPU, Device, Link, Tables
from orchestrator.strategies.model_work import IN_KERNELS

UNFUSED = Stack(products=1.0, attention=1.0, moved=1 / IN_KERNELS)
"""Of what is measured here, products reach all, and each operator moves its own bytes."""
_SIZE, _COPIED = 1024, 2**25
_TIMES = 5
_COPIES = 4
"""How often gloo copies a byte from worker to worker through the kernel; an assumption."""


def with_cpus(tables: Tables) -> Tables:
    """Return the tables with a core of this machine as the device ``cpu``. Takes a second.

    A matrix product in float32 and a copy of memory are measured on one core, while the others do what they do.
    """
    cores = os.cpu_count() or 1
    a, b = torch.randn(_SIZE, _SIZE), torch.randn(_SIZE, _SIZE)
    source, target = torch.zeros(_COPIED, dtype=torch.uint8), torch.empty(_COPIED, dtype=torch.uint8)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        product_s = _shortest_s(lambda: torch.mm(a, b))
        copy_s = _shortest_s(lambda: target.copy_(source))
    finally:
        torch.set_num_threads(threads)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    gb_s = 2 * _COPIED / copy_s / 1e9
    device = Device(
        bf16=2 * _SIZE**3 / product_s / 1e12,
        memory_gib=memory / GIB / cores,
        memory_gb_s=gb_s,
        inside=CPU,
        between=CPU,
        node=cores,
        domain=None,
        source="measured on a core of this machine, in float32",
    )
    link = Link(gb_s=gb_s / 2 / _COPIES, source=f"a byte is copied {_COPIES} times")
    return replace(tables, devices={**tables.devices, CPU: device}, links={**tables.links, CPU: link})


def _shortest_s(run: Callable[[], object]) -> float:
    found = []
    for _ in range(_TIMES):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return min(found)

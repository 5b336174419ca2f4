"""Which backend a process group has, and what torch's flight recorder has recorded of it.

Imports nothing of ours, because a script that hangs reads this file too: see ``features/scripts/at_start``. The private
parts of torch are checked with torch 2.11, 2.13 and 2.15.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d_bindings

NCCL_BACKENDS = ("nccl", "nccl2")
"""What the backends that torch makes for ``nccl`` call themselves. From torch 2.15 there are two: the older one if
``TORCH_DIST_USE_NCCL2`` is 0, else the newer one, of which each communicator is aborted in the same way."""


def nccl_backend(group: dist.ProcessGroup) -> Any:
    """Return the NCCL backend of a group; None if it has none for GPUs but gloo.

    Raises:
        RuntimeError: it has another backend, which nobody knows how to abort.
    """
    try:
        backend = group._get_backend(torch.device("cuda"))
    except RuntimeError:
        return None
    if (name := backend.name()) not in (*NCCL_BACKENDS, "gloo"):
        raise RuntimeError(
            f"the backend for GPUs of torch {torch.__version__} is {name!r}, from which a run cannot recover, unlike "
            f"{' and '.join(NCCL_BACKENDS)}: unset TORCH_DISTRIBUTED_USE_TORCHCOMMS, or install torch 2.11 to 2.15"
        )
    return None if name == "gloo" else backend


def flight_record(group: dist.ProcessGroup | None) -> str:
    """Return what the flight recorder of this process has recorded of the backend of a group, as JSON.

    Each backend has a recorder, which is of all of its groups. Without a ``group``, nothing has been enqueued.
    """
    if group is None:
        return "{}"
    backend = nccl_backend(group)
    return record_of("gloo" if backend is None else backend.name())


def record_of(backend: str) -> str:
    """Return what the flight recorder of the backend that calls itself ``backend`` has recorded in this process."""
    bindings = cast(Any, c10d_bindings)
    if backend == "gloo":
        dump = bindings._dump_fr_trace_json()
    elif backend == "nccl":
        dump = bindings._dump_nccl_trace_json()
    else:
        dump = bindings._dump_fr_trace_json(backend=backend)
    return str(dump, errors="replace")

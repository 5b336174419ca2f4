"""Recording of what a rank communicates through its process groups, whether Python or C++ starts it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group as resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.ranks.deadlock import Launch, Operation
from orchestrator.compat.enqueue_gate import EnqueueGate, enqueueing_through
from orchestrator.model.batch import tensors_in


@contextlib.contextmanager
def recorded(gate: CountingGate | None = None) -> Iterator[list[Launch]]:
    """Record the launches of this thread, each of which has to pass a ``gate``, as it does on a GPU.

    Creating a group is not recorded: it meets at the store, with any backend.
    """
    gate = CountingGate() if gate is None else gate
    with enqueueing_through(gate, device="CPU"):
        recorder = _Recorder(gate)
        with recorder, patch.object(dist, "batch_isend_irecv", recorder.batch):
            yield recorder.launches


class CountingGate(EnqueueGate):
    """Counts how often threads have ``passed``, and is closed after ``closes_after`` times."""

    def __init__(self) -> None:
        super().__init__()
        self.passed = 0
        self.closes_after = math.inf

    def __enter__(self) -> None:
        if self.passed >= self.closes_after:
            self.close(timeout_s=0)
        super().__enter__()
        self.passed += 1


class _Recorder(TorchDispatchMode):
    """Sees the operators through which all communication of process groups passes: ``c10d``, or what calls these."""

    def __init__(self, gate: CountingGate) -> None:
        super().__init__()
        self.launches: list[Launch] = []
        self._gate = gate
        self._unbatched = dist.batch_isend_irecv

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self._gate.passed
        result = func(*args, **(kwargs or {}))
        is_functional = func.namespace == "_c10d_functional" and isinstance(args[-1], str)  # the name of a group
        if func.namespace == "c10d" or is_functional:
            self.launches.append((_operation(func.name().partition("::")[2].removesuffix("_"), args),))
            assert self._gate.passed > before, f"{func} has not passed the gate"
        return result

    def batch(self, transfers: list[dist.P2POp]) -> list[dist.Work]:
        """Make one launch of the transfers, as NCCL does; gloo makes one of each."""
        first = len(self.launches)
        works = self._unbatched(transfers)
        self.launches[first:] = [tuple(operation for launch in self.launches[first:] for operation in launch)]
        return works


def _operation(name: str, args: Sequence[Any]) -> Operation:
    boxed = [a for a in args if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type())]
    group = dist.ProcessGroup.unbox(boxed[0]) if boxed else resolve_process_group(args[-1])
    ranks = tuple(dist.get_process_group_ranks(group))
    nbytes = max(sum(tensor.nbytes for tensor in tensors_in(arg)) for arg in args)
    if name in ("send", "recv"):
        own, peer = dist.get_rank(), ranks[args[2]]
        name, ranks = "transfer", (own, peer) if name == "send" else (peer, own)
    return Operation(name=name, group=group.group_name, ranks=ranks, nbytes=nbytes)

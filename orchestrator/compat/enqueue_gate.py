"""A gate for the threads that enqueue operations of process groups, so that none does while another aborts them.

NCCL frees the memory of a communicator that it aborts. A thread that enqueues an operation on it at this moment ends
the process by SIGSEGV (NVIDIA/nccl#992, NVIDIA/nccl#1797), and nothing in NCCL or torch prevents that.

All operations of process groups pass the operators of the namespace ``c10d``, whether Python or C++ starts them, as
``DistributedDataParallel`` does. What they enqueue in a batch is enqueued at the end of the batch, and a communicator
is formed without an operator, so two functions of ``torch.distributed`` pass the gate too.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch._C import DispatchKey, DispatchKeySet

_FUNCTIONS = ("batch_isend_irecv", "new_group")


class _Depth(threading.local):
    """How many times this thread is inside."""

    value = 0


class EnqueueGate:
    """Lets any number of threads in, which have to leave before they wait for an operation, until it is closed.

    A context manager: its block is inside. A thread that is inside may enter again, also if the gate has been closed
    meanwhile, so that no batch remains unfinished.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left = threading.Condition(self._lock)
        self._is_closed = False
        self._inside = 0
        self._depth = _Depth()

    def __enter__(self) -> None:
        """Enter.

        Raises:
            ConnectionAbortedError: the gate is closed.
        """
        if self._depth.value == 0:
            with self._lock:
                if self._is_closed:
                    raise ConnectionAbortedError("the process groups are aborted, because another rank was lost")
                self._inside += 1
        self._depth.value += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._depth.value -= 1
        if self._depth.value == 0:
            with self._lock:
                self._inside -= 1
                if self._is_closed:
                    self._left.notify_all()

    def close(self, *, timeout_s: float) -> bool:
        """Let no thread in, and wait until those inside have left, for at most ``timeout_s``.

        Returns:
            Whether all have left. A thread stays if the operation blocks, as the first one between two ranks may, or
            any one if the device has too many waiting. Only the abort frees it.
        """
        with self._left:
            self._is_closed = True
            return self._left.wait_for(lambda: self._inside == 0, timeout_s)

    def open(self) -> None:
        """Let threads in again."""
        with self._lock:
            self._is_closed = False


@contextlib.contextmanager
def enqueueing_through(gate: EnqueueGate, *, device: Literal["CPU", "CUDA"]) -> Iterator[None]:
    """Let every thread pass ``gate`` while it enqueues an operation of a process group, in the block.

    ``device``: where the tensors of an operation are. Others do not pass: gloo frees a thread that waits by itself.
    """
    library = torch.library.Library("c10d", "IMPL")
    for name in (name.removeprefix("c10d::") for name in torch._C._dispatch_get_all_op_names()):
        if "::" not in name:
            operator = getattr(torch.ops.c10d, name).default
            # A key of every call, whatever its tensors. What follows it runs without the GIL.
            kernel = _kernel(operator._handle.redispatch_boxed, gate, DispatchKey.__members__[device])
            library.impl(name, kernel, "BackendSelect", with_keyset=True)
    functions = {name: getattr(dist, name) for name in _FUNCTIONS}
    try:
        for name, function in functions.items():
            setattr(dist, name, _inside(gate, function))
        yield
    finally:
        for name, function in functions.items():
            setattr(dist, name, function)
        library._destroy()


GATE = EnqueueGate()
"""The gate of this process, which :func:`guard_gpus` sets up."""


@functools.cache
def guard_gpus() -> contextlib.ExitStack:
    """Let every thread of this process pass :data:`GATE` while it enqueues an operation on GPUs, from now on."""
    for_ever = contextlib.ExitStack()
    for_ever.enter_context(enqueueing_through(GATE, device="CUDA"))
    return for_ever


def _kernel(redispatch: Callable[..., Any], gate: EnqueueGate, device: DispatchKey) -> Callable[..., Any]:
    def enqueue(keys: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        following = keys.remove(DispatchKey.BackendSelect)
        if not keys.has(device):
            return redispatch(following, *args, **kwargs)
        with gate:
            return redispatch(following, *args, **kwargs)

    return enqueue


def _inside(gate: EnqueueGate, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def enqueue(*args: Any, **kwargs: Any) -> Any:
        with gate:
            return function(*args, **kwargs)

    return enqueue

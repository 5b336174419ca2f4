"""A pool of processes that stay alive for many tests and form a process group for each call, with gloo or NCCL.

One leader process imports torch and forks the others, so that the pool costs one import. Processes that use a GPU are
forked first, because CUDA does not survive a fork.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import pickle
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Literal

from helpers.machines.shared_gpu import share_gpu

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

HOST = "127.0.0.1"
SIZE = 8
START_TIMEOUT_S = 120.0
SOON_S = 60.0
"""Limit of calls in which no rank may wait until the collective timeout (`cases.CLUSTER`), which is longer."""


@dataclass(frozen=True, kw_only=True)
class Backend:
    """Where the ranks compute, and how they communicate.

    ``patience``: the factor of all time limits. The first use of a GPU takes seconds.
    """

    device: Literal["cpu", "cuda"]
    name: Literal["gloo", "nccl"]
    patience: float = 1.0


GLOO = Backend(device="cpu", name="gloo")
NCCL = Backend(device="cuda", name="nccl", patience=1.5)
BACKENDS = {"gloo": GLOO, "nccl": NCCL}

_backend = GLOO
"""The backend of this process."""
_gangs: dict[Backend, Gang] = {}


def own_device() -> torch.device:
    """The device on which this process computes: the only GPU, or the CPU, also in the process of the tests."""
    import torch

    return torch.device("cuda", 0) if _backend.device == "cuda" else torch.device("cpu")


def gang_on(backend: Backend, imports: Sequence[str] = ()) -> Gang:
    """The gang with this backend, the same one for all tests until :func:`close_gangs`."""
    if backend not in _gangs:
        _gangs[backend] = Gang(backend, imports)
    return _gangs[backend]


def close_gangs() -> None:
    while _gangs:
        _gangs.popitem()[1].close()


@dataclass(frozen=True, kw_only=True)
class Call:
    """What a process is asked to do; ``store_port`` None: without a process group."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    world_size: int
    generation: int
    store_port: int | None
    timeout_s: float


@dataclass(frozen=True, kw_only=True)
class Answer:
    value: Any = None
    error: str | None = None
    trace: str = ""


class Gang:
    """``SIZE`` processes with one thread each. A call that takes too long ends them all; the next starts anew.

    With NCCL they share one GPU. ``imports`` are modules that calls need, loaded once for all processes.
    """

    def __init__(self, backend: Backend = GLOO, imports: Sequence[str] = ()) -> None:
        from orchestrator.worker.control.rendezvous import open_store

        self.backend = backend
        self.imports = ",".join(imports)
        self._store = open_store(HOST, timeout_s=30)
        self._generation = 0
        self._connections: list[Connection] = []
        self._leader: subprocess.Popen[bytes] | None = None

    def run(self, function: Callable[..., Any], *args: Any, world_size: int, timeout_s: float = 120) -> list[Any]:
        """What ``function(rank, *args)`` returns on each rank of a group of ``world_size``; they leave together."""
        answers = self.ask(function, *args, world_size=world_size, timeout_s=timeout_s)
        errors = [f"rank {rank}: {a.trace}" for rank, a in enumerate(answers) if a.error is not None]
        if errors:
            raise AssertionError("\n".join(errors))
        return [a.value for a in answers]

    def ask(
        self, function: Callable[..., Any], *args: Any, world_size: int, timeout_s: float = 120, grouped: bool = True
    ) -> list[Answer]:
        """As :meth:`run`, but errors are answers too. Not ``grouped``: the ranks form no group by themselves."""
        self._start()
        timeout_s *= self.backend.patience
        self._generation += 1
        call = Call(
            function=function,
            args=args,
            world_size=world_size,
            generation=self._generation,
            store_port=self._store.port if grouped and world_size > 1 else None,
            timeout_s=timeout_s,
        )
        connections = self._connections[:world_size]
        deadline = time.monotonic() + timeout_s
        answers = []
        try:
            for connection in connections:
                connection.send_bytes(pickle.dumps(call))
            for rank, connection in enumerate(connections):
                if not connection.poll(max(0.0, deadline - time.monotonic())):
                    waiting = [r for r in range(world_size) if self._store.check([key(call, r, "ended")])]
                    raise TimeoutError(f"rank {rank} did not answer within {timeout_s} s; ranks at the end: {waiting}")
                answers.append(pickle.loads(connection.recv_bytes()))
        except BaseException:
            self.close()
            raise
        return answers

    def close(self) -> None:
        """End every process, at once."""
        for connection in self._connections:
            connection.close()
        self._connections = []
        if self._leader is not None:
            os.killpg(self._leader.pid, signal.SIGKILL)
            self._leader.wait(timeout=10)
            self._leader = None

    def _start(self) -> None:
        if self._leader is not None:
            return
        pairs = [Pipe() for _ in range(SIZE)]
        theirs = [there.fileno() for _, there in pairs]
        self._leader = subprocess.Popen(
            [sys.executable, "-m", "helpers.ranks.gang", self.backend.name, self.imports, *map(str, theirs)],
            pass_fds=theirs,
            start_new_session=True,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "TORCHINDUCTOR_COMPILE_THREADS": "1",
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            },
        )
        for _, there in pairs:
            there.close()
        self._connections = [here for here, _ in pairs]
        for here in self._connections:
            if not here.poll(START_TIMEOUT_S * self.backend.patience):
                self.close()
                raise TimeoutError("the processes did not start in time")
            here.recv_bytes()


def _lead(backend: Backend, imports: Sequence[str], fds: list[int]) -> None:
    global _backend
    _backend = backend
    _die_with_parent()
    if backend.device == "cpu":
        _import(imports)
    gc.freeze()  # so that no rank looks through what is imported, which would copy it
    for rank, fd in enumerate(fds):
        if os.fork() == 0:
            _die_with_parent()
            for other in fds:
                if other != fd:
                    os.close(other)
            _import(imports)
            _serve(rank, Connection(fd))
            os._exit(0)
    for fd in fds:
        os.close(fd)
    for _ in fds:
        os.wait()


def _import(names: Sequence[str]) -> None:
    """Import what most calls need, and the modules of these names."""
    import pytest  # noqa: F401 - the modules that calls come from import it
    import torch._dynamo  # noqa: F401 - making an optimizer imports it

    import jobs.digits
    import jobs.gpt  # noqa: F401
    from helpers.conformance import matrix, reference  # noqa: F401

    for name in names:
        importlib.import_module(name)


def _serve(rank: int, connection: Connection) -> None:
    import torch

    from orchestrator.model.batch import map_tensors

    torch.set_num_threads(1)
    if _backend.device == "cuda":
        share_gpu(str(rank))
        torch.cuda.set_device(own_device())
    connection.send_bytes(b"ready")
    while True:
        try:
            request = connection.recv_bytes()
        except EOFError:
            return
        try:
            call: Call = pickle.loads(request)
            torch.set_float32_matmul_precision("highest")  # an earlier call may have used TF32
            torch.backends.cudnn.allow_tf32 = False
            with group_of(rank, call):
                value = call.function(rank, *call.args)
                if _backend.device == "cuda":
                    value = map_tensors(torch.Tensor.cpu, value)
            answer = Answer(value=value)
        except BaseException as e:
            answer = Answer(error=f"{type(e).__name__}: {e}", trace=traceback.format_exc())
        connection.send_bytes(pickle.dumps(answer))


@contextlib.contextmanager
def group_of(rank: int, call: Call) -> Iterator[None]:
    """The process group that ``call`` asks for."""
    from helpers.conformance.cases import assignment
    from helpers.conformance.training import close_strategies
    from orchestrator.worker.control import rendezvous

    if call.store_port is None:
        yield
        return
    orders = assignment(
        rank=rank,
        world_size=call.world_size,
        generation=call.generation,
        store_port=call.store_port,
        run_dir="",
        backend=_backend.name,
        rendezvous_timeout_s=60 * _backend.patience,
    )
    store = rendezvous.join(orders, store=None)
    try:
        rendezvous.connect(orders, store, node_ip=HOST, device=own_device())
        # A rank that leaves closes its groups, which another one may still connect or use. Only one that fails does so.
        meet(store, call, rank, "connected")
        yield
        meet(store, call, rank, "ended")
    finally:
        store.set(key(call, rank, "ended"), "")
        close_strategies()
        rendezvous.leave()
        del store


def meet(store: dist.Store, call: Call, rank: int, place: str) -> None:
    """Wait until every rank has come to ``place``."""
    store.set(key(call, rank, place), "")
    store.wait([key(call, r, place) for r in range(call.world_size)], timedelta(seconds=call.timeout_s))


def key(call: Call, rank: int, place: str) -> str:
    return f"gang-{call.generation}-{place}-{rank}"


def _die_with_parent() -> None:
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


if __name__ == "__main__":
    # Not as __main__, so that the classes it unpickles are those that it defines.
    from helpers.ranks import gang

    gang._lead(
        gang.BACKENDS[sys.argv[1]], sys.argv[2].split(",") if sys.argv[2] else (), [int(fd) for fd in sys.argv[3:]]
    )

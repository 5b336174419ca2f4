"""A rank without Ray: one thread trains, and another follows orders, with the classes that a worker uses for that.

Every update is exact in float32, so the weights tell how many updates were made, and from what.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from queue import SimpleQueue

import torch
import torch.distributed as dist

from helpers.conformance.cases import assignment
from helpers.machines.shared_gpu import share_gpu
from orchestrator.compat.backends import record_of
from orchestrator.compat.process_groups import new_nccl_group
from orchestrator.protocol.flight import enqueued_in
from orchestrator.strategies.update.confirmation import confirmation
from orchestrator.worker.control import rendezvous
from orchestrator.worker.control.control import StepGate
from orchestrator.worker.control.rendezvous import Teardown
from orchestrator.worker.process.network import nccl_variables

HOST = "127.0.0.1"
LEARNING_RATE = 2.0**-10
RENDEZVOUS_TIMEOUT_S = 60.0
WORD_TIMEOUT_S = 60.0
"""How long a rank that has failed waits for an order to abort."""


@dataclass(frozen=True, kw_only=True)
class Train:
    """Form a group and train in it.

    Attributes:
        rank: of this process. Rank 0 sends its weights to the others first.
        communicators: how many there are. Each step uses one after the other, on one stream.
        steps: how many to make.
        pause_s: the time between two steps.
        fails_at: the step at which this rank makes an error of the device; None for no error.
    """

    rank: int
    world_size: int
    generation: int
    store_port: int
    communicators: int
    steps: int
    pause_s: float
    fails_at: int | None = None


@dataclass(frozen=True)
class Record:
    """Read the flight recorder."""


@dataclass(frozen=True)
class Abandon:
    """Mark a generation as ended, as the driver does on all ranks before any of them aborts."""

    generation: int


@dataclass(frozen=True)
class Abort:
    """Abort the communicators of a generation."""

    generation: int


@dataclass(frozen=True)
class Ready:
    """The process is there."""


@dataclass(frozen=True, kw_only=True)
class Joined:
    """The group is formed, in so many ``seconds``."""

    backend: str
    seconds: float


@dataclass(frozen=True)
class Recorded:
    """The flight recorder has so many entries of collective operations of this generation; -1 if it is unreadable."""

    operations: int


@dataclass(frozen=True)
class Marked:
    """The generation is marked as ended."""


@dataclass(frozen=True)
class Aborted:
    """The abort has returned, after so many seconds."""

    seconds: float


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The training has ended.

    Attributes:
        step: the last complete one.
        error: the type and first line of the error that has ended it; None after the last step.
        exact: whether the weights are those after ``step``.
    """

    step: int
    error: str | None
    exact: bool


def serve(connection: Connection, on_cpu: bool) -> None:
    """Follow the orders that come through ``connection`` until it is closed."""
    rank = Rank(connection, on_cpu)
    threading.Thread(target=rank.follow, name="control", daemon=True).start()
    rank.answer(Ready())
    while True:
        rank.train(rank.orders.get())


class Rank:
    """The weights of a rank, and what its two threads share."""

    def __init__(self, connection: Connection, on_cpu: bool):
        self.orders: SimpleQueue[Train] = SimpleQueue()
        self._connection = connection
        self._sending = threading.Lock()
        self._backend = "gloo" if on_cpu else "nccl"
        self._gate = StepGate(timeout_s=WORD_TIMEOUT_S)
        self._teardown = Teardown(word_timeout_s=WORD_TIMEOUT_S)
        self._made = self._backend  # what the backend that torch has made for it calls itself
        self._joined: tuple[int, int] | None = None
        torch.set_num_threads(1)
        if not on_cpu:
            share_gpu(str(os.getpid()))
            os.environ |= nccl_variables(os.environ, recovers=True)
            torch.cuda.set_device(0)
        self._device = torch.device("cpu" if on_cpu else "cuda:0")
        self._weights = torch.zeros(2**22, device=self._device)
        size = 128 if on_cpu else 2048
        self._matrix = torch.randn(size, size, device=self._device)
        self._step = 0

    def answer(self, what: object) -> None:
        """Tell the parent; any thread may."""
        with self._sending:
            self._connection.send(what)

    def follow(self) -> None:
        """Obey until the parent is gone. All but the training is done here, as on the control thread of a worker."""
        while True:
            try:
                order = self._connection.recv()
            except EOFError:
                os._exit(0)
            match order:
                case Train():
                    self.orders.put(order)
                case Record():
                    self.answer(Recorded(self._recorded()))
                case Abandon(generation):
                    self._gate.abandon(generation)
                    self.answer(Marked())
                case Abort(generation):
                    began = time.monotonic()
                    self._teardown.abort(generation)
                    self.answer(Aborted(time.monotonic() - began))

    def train(self, order: Train) -> None:
        """Train as ordered, and release the groups."""
        error, groups = None, list[dist.ProcessGroup]()
        try:
            with self._member(order, groups):
                self._steps(order, groups)
        except BaseException as e:
            traceback.print_exc()
            error = f"{type(e).__name__}: {str(e).strip().partition(chr(10))[0]}"[:120]
        factor = order.world_size * (order.world_size + 1) / 2 * order.world_size ** (order.communicators - 1)
        expected = -self._step * factor * LEARNING_RATE
        exact = False
        with contextlib.suppress(RuntimeError):  # of the device
            exact = bool((self._weights == expected).all())
        self.answer(Ended(step=self._step, error=error, exact=exact))
        self._teardown.start(groups.clear, clean=error is None)

    @contextlib.contextmanager
    def _member(self, order: Train, groups: list[dist.ProcessGroup]) -> Iterator[None]:
        """Form the groups, into ``groups``, and take the weights of rank 0. The store lives as long as the block."""
        began = time.monotonic()
        self._teardown.begin(order.generation, backend=self._backend)
        run = assignment(
            rank=order.rank,
            world_size=order.world_size,
            generation=order.generation,
            store_port=order.store_port,
            run_dir="",
            backend=self._backend,
            rendezvous_timeout_s=RENDEZVOUS_TIMEOUT_S,
        )
        store = rendezvous.join(run, store=None, gate=self._gate)
        self._joined = time.time_ns(), order.world_size
        rendezvous.connect(run, store, node_ip=HOST, device=self._device)
        assert dist.group.WORLD is not None
        groups.append(dist.group.WORLD)
        for _ in range(order.communicators - 1):
            everyone, timeout = range(order.world_size), timedelta(seconds=RENDEZVOUS_TIMEOUT_S)
            on_gpu = self._device.type == "cuda"
            groups.append(new_nccl_group(everyone, timeout=timeout) if on_gpu else dist.new_group())
        step = torch.tensor([self._step], device=self._device)
        for tensor in (self._weights, step):
            dist.broadcast(tensor, src=0)
        self._step = int(step)
        self._made = groups[0]._get_backend(self._device).name()
        self.answer(Joined(backend=self._made, seconds=time.monotonic() - began))
        yield
        del store

    def _steps(self, order: Train, groups: list[dist.ProcessGroup]) -> None:
        def check() -> None:
            self._gate.check(order.generation)

        confirm = confirmation(self._device, check, has_peers=True, recovers=True)
        for _ in range(order.steps):
            check()
            gradient = torch.full_like(self._weights, order.rank + 1.0)
            for _ in range(5):
                self._matrix = torch.tanh(self._matrix @ self._matrix)
            if self._step + 1 == order.fails_at:
                self._weights[torch.tensor([len(self._weights)], device=self._device)]
            for group in groups:
                dist.all_reduce(gradient, group=group)
            confirm()
            self._weights.sub_(gradient, alpha=LEARNING_RATE)
            self._step += 1
            time.sleep(order.pause_s)
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def _recorded(self) -> int:
        try:
            assert self._joined is not None
            since_ns, world_size = self._joined
            found = enqueued_in(record_of(self._made), since_ns=since_ns, world_size=world_size)
            return sum(found.last.values())
        except Exception:
            traceback.print_exc()
            return -1

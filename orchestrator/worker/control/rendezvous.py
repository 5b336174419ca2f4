"""The process groups of a generation: store, network interface, backend, timeouts, release."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from orchestrator.compat.backends import nccl_backend
from orchestrator.compat.enqueue_gate import GATE, guard_gpus
from orchestrator.compat.generators import derived_seed, seed_generators
from orchestrator.compat.process_groups import abort_process_groups, restart_group_numbers
from orchestrator.compat.resolver import without_name_servers
from orchestrator.protocol.messages import Assignment
from orchestrator.strategies.rank_context import Context
from orchestrator.worker.control.control import PeersMissingError, StepGate
from orchestrator.worker.process import network
from orchestrator.worker.process.network import nccl_variables
from orchestrator.worker.process.output import print_error

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
    network.choose_for(assignment, node_ip=node_ip)
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


RELEASE_TIMEOUT_S = 30.0


class ReleaseError(RuntimeError):
    """The process groups of an earlier generation are still there, so that this process cannot join another one."""


class Teardown:
    """Releases the process groups of one generation after another. No outcome waits for that.

    Under NCCL, ``destroy_process_group`` waits for all ranks, and one of them may have failed. If a rank reported its
    outcome after that, the driver would see a failure as a hang, and blame a rank that only waits. So the outcome goes
    out first, and a thread releases the groups. With gloo, it destroys them if the generation has ended in order on
    this rank. Otherwise it aborts their communicators, which waits for nobody.

    With NCCL, it always aborts them, because a rank that has ended in order cannot know that its peers have. The word
    of the driver comes before any abort. What an aborted rank sends and computes is garbage, so all ranks have to know
    first that the generation has ended (see ``driver/run/run_workers.py``). The control thread then aborts the
    groups at once, because nothing else frees a rank that waits for a lost one. The beginning of another generation is
    the word too: the driver begins it when every rank has ended or is lost. Without a word, a rank that has failed ends
    its process, which posts no garbage.

    The destructor of a group joins threads of torch, which may be waiting for a device that has failed. So the groups
    of NCCL are dropped on a thread that nothing waits for.

    Args:
        word_timeout_s: how long a rank that has failed waits for the word of the driver, before it ends its process.
        timeout_s: how long a generation waits for the release of the one before.
    """

    def __init__(self, *, word_timeout_s: float, timeout_s: float = RELEASE_TIMEOUT_S):
        self._word_timeout_s = word_timeout_s
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._generation = 0
        self._frees_waits = False
        self._word = threading.Event()
        self._aborted: list[dist.ProcessGroup] | None = None
        self._thread: threading.Thread | None = None

    @property
    def has_aborted(self) -> bool:
        """Whether :meth:`abort` has ended the groups of the present generation, so that any error may follow."""
        return self._aborted is not None

    def begin(self, generation: int, *, backend: str) -> None:
        """Wait until the groups of the generation before are released; the groups of ``generation`` may then be formed.

        Raises:
            ReleaseError: they were not released in time.
        """
        self._word.set()
        if self._thread is not None:
            self._thread.join(self._timeout_s)
            if self._thread.is_alive():
                raise ReleaseError(
                    f"the process groups of generation {self._generation} were not released within "
                    f"{self._timeout_s:g} s, so this process cannot continue"
                )
        self._thread = None
        with self._lock:
            self._generation, self._frees_waits, self._aborted = generation, backend == "nccl", None
            self._word.clear()

    def abort(self, generation: int) -> None:
        """Abort the groups of ``generation`` or an earlier one, if nothing else would free a rank that waits in them.

        Any thread may call this. gloo frees such a rank itself when the connection to the lost one closes. Errors are
        only printed.
        """
        with self._lock:
            if self._frees_waits and self._generation <= generation and self._aborted is None:
                self._aborted = []
                try:
                    self._aborted = abort()
                except Exception:
                    print_error()
                self._word.set()

    def start(self, close: Callable[[], None], *, clean: bool) -> None:
        """Release the groups on a thread of its own. Errors are only printed.

        Args:
            close: releases what refers to the groups.
            clean: whether the generation has ended in order on this rank.
        """
        self._thread = threading.Thread(target=self._release, args=(close, clean), name="teardown", daemon=True)
        self._thread.start()

    def _release(self, close: Callable[[], None], clean: bool) -> None:
        # First, because the groups must not be destroyed by what refers to them: see `abort_process_groups`.
        _attempt(close)
        if not self._frees_waits:
            _attempt(leave if clean else abort)
            return
        if not self._word.wait(None if clean else self._word_timeout_s):
            print(
                f"generation {self._generation} has failed here, and no order to abort it came from the driver within "
                f"{self._word_timeout_s:g} s (cluster.heartbeat_timeout_s); this process exits",
                file=sys.stderr,
                flush=True,
            )
            os._exit(1)
        self.abort(self._generation)
        with self._lock:
            groups, self._aborted = self._aborted or [], []
        threading.Thread(target=groups.clear, name="groups", daemon=True).start()


def _attempt(release: Callable[[], object]) -> None:
    try:
        release()
    except Exception:  # a connection may be broken
        print_error()


def context_of(assignment: Assignment, device: torch.device) -> Context:
    """Return what a strategy knows about its rank in a generation."""
    config, plan = assignment.config, assignment.plan
    return Context(
        mesh=plan.mesh,
        global_rank=assignment.global_rank,
        device=device,
        seed=config.seed,
        train=config.train,
        options=config.strategy,
        collective_timeout_s=config.cluster.collective_timeout_s,
        pipeline=plan.pipeline,
        num_devices=plan.devices_per_worker,
        peer_copy_every=config.recovery.peer_copy_every,
        only_trained=config.checkpoint.only_trained,
    )


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed Python, NumPy and torch from (seed, step, rank), so that random operations repeat after a resume."""
    seed_generators(derived_seed(seed, step, rank))

"""The gang: the workers of a run, acquired and released together, replaced one by one."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial

from orchestrator.compat.ray.datasets import free_cpus
from orchestrator.compat.ray.gcs import all_nodes
from orchestrator.driver.code.worker_code import WorkerCode
from orchestrator.driver.gang.members import Member, Members
from orchestrator.driver.gang.slots import Slots, kill_process, wait_for_actors
from orchestrator.driver.gang.spares import START_ATTEMPTS, Admission, Spares
from orchestrator.driver.nodes.node_watch import NodeWatch
from orchestrator.driver.process import calls
from orchestrator.driver.process.waiting import ResourceWait, WaitMonitor
from orchestrator.planning.plan import Plan
from orchestrator.policy.elastic import Sizes
from orchestrator.policy.shortage import Request, room
from orchestrator.policy.worker_gpus import groups_on_one_node, rank_order, servers_last, shared_gpu, unusable_gpus
from orchestrator.protocol.messages import Variables, WorkerEnvironment, WorkerInfo

PLACEMENT_PATIENCE_S = 1.5
"""An elastic run tries a smaller size if Ray has not placed its workers after this time."""
SPARES_POLL_S = 0.2
SHARED_GPU = "ORCHESTRATOR_TEST_SHARED_GPU"
"""Environment variable for the tests of this project alone: if set, several workers may use one GPU."""


class Gang(Members):
    """All workers of a run. Use as a context manager, which releases everything on exit.

    Attributes:
        waited_s: how long :meth:`acquire` has waited for resources, in seconds.
    """

    def __init__(
        self,
        plan: Plan,
        environment: WorkerEnvironment,
        code: WorkerCode,
        nodes: NodeWatch,
        admission: Admission,
        monitor: WaitMonitor,
        *,
        variables: Variables,
        label: str,
    ):
        super().__init__()
        self.waited_s = 0.0
        self._plan = plan
        self._nodes = nodes
        self._admission = admission
        self._monitor = monitor
        self._environment = environment
        self._code = code
        self._config = environment.config.cluster
        self._label = label
        self._slots = Slots(
            plan,
            code,
            start_timeout_s=self._config.start_timeout_s,
            heartbeat_timeout_s=self._config.heartbeat_timeout_s,
            variables=variables,
            label=label,
        )
        self._spares = Spares(self._slots, nodes, admission, environment, monitor, one_node=plan.one_node)
        self._lost: set[int] = set()  # ranks whose workers are lost or must leave, until ranks are assigned again

    def __enter__(self) -> Gang:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    @property
    def reserved_by_node(self) -> Mapping[str, int]:
        """For how many workers resources are reserved on each node, by its id. Another thread may read this."""
        return self._slots.num_by_node()

    def release(self) -> None:
        """Kill all workers and give back their resources. The gang may be acquired again."""
        self._slots.release()
        self._assign(())
        self._spares.forget()
        self._lost = set()

    def acquire(self, sizes: Sizes) -> Plan:
        """Reserve the resources, start the actors, and assign the ranks.

        Returns:
            The plan of the run: the initial one, or one of a smaller size if there is no room for it at this moment.

        Raises:
            GangError: not in time, a GPU cannot be used, or two workers landed on one GPU.
            Interrupted: a stop was requested.
            TurnLostError: another run goes first.
        """
        placed = self._reserve(sizes)
        slots, plan = list(placed), self._plan
        hosts = {node.node_id.hex(): node.node_manager_hostname for node in all_nodes()}
        infos = wait_for_actors(
            {self._slots.start(slot): hosts[node_id] for slot, node_id in placed.items()},
            timeout_s=self._config.start_timeout_s,
            pip=self._code.pip,
            monitor=self._monitor,
        )
        self._check_devices(infos)
        group_size = len(plan.mesh.close_groups[0])
        order = groups_on_one_node(infos, rank_order(infos), group_size=group_size)
        by_rank = servers_last(infos, order[: plan.world_size], num_servers=plan.mesh.num_servers)
        self._assign_ranks([(slots[index], infos[index]) for index in by_rank])
        self._spares.begin({slots[index]: infos[index] for index in order[plan.world_size :]})
        return plan

    def _reserve(self, sizes: Sizes) -> dict[int, str]:
        """Reserve the slots of the largest size with room, or of the smallest one as soon as there is room for it.

        Slots on a node that is not admitted are given back, and sought elsewhere, unless another run waits.

        Returns:
            The id of the node of each slot, node by node.
        """
        least = sizes.smallest.world_size
        wanted = f"at least {_workers(least)}" if sizes.is_elastic else _workers(least)
        wait = self._wait_for(wanted, least + self._plan.spares, unfit_timeout_s=self._config.unfit_timeout_s)
        waited_before_s = self.waited_s
        plan = sizes.fitting(self._room(sizes, wait)) if sizes.cpus_of_data else sizes.initial
        while True:
            avoid = frozenset(self._admission.trouble())
            patience_s = math.inf if plan.mesh == sizes.smallest else PLACEMENT_PATIENCE_S
            given_up_at = time.monotonic() + patience_s
            placed = self._slots.reserve_all(
                plan.world_size + plan.spares,
                one_node=plan.one_node,
                avoid=avoid,
                wait=wait,
                gives_up=partial(self._gives_up, given_up_at, avoid),
            )
            self.waited_s = waited_before_s + wait.waited_s
            if placed is None:
                plan = sizes.next_request(
                    plan,
                    self._room(sizes, wait),
                    patience_is_over=time.monotonic() > given_up_at,
                )
            elif self._admission.admits_all(set(placed.values())):
                self._plan = plan
                return placed
            else:
                self._slots.release()
            if self._admission.trouble().keys() - avoid:
                self._monitor.offer_turn()

    def room_beside(self, cpus: float) -> int:
        """Return how many workers there may be, present ones included, if ``cpus`` are to stay free in the cluster."""
        free, _ = free_cpus()
        return sum(self.reserved_by_node.values()) + math.floor((free - cpus) / self._slots.resources["CPU"] + 1e-6)

    def _room(self, sizes: Sizes, wait: ResourceWait) -> int:
        """Return for how many workers there is room while none is reserved."""
        found = room(self._request(1), wait.state())
        return min(found, self.room_beside(sizes.cpus_of_data)) if sizes.cpus_of_data else found

    def _gives_up(self, at: float, avoided: frozenset[str]) -> bool:
        """Return whether a wait is over: it is ``at`` or later, or other nodes than ``avoided`` have to be."""
        return time.monotonic() > at or self._admission.has_changed(avoided)

    def lose(self, ranks: Collection[int]) -> None:
        """Take back the slots of workers that are lost or must leave, and kill what is left of them."""
        for rank in ranks:
            self._vacate(self.members[rank])
        self._spares.vacate_lost_nodes()
        self._lost |= set(ranks)

    @property
    def workers(self) -> tuple[WorkerInfo, ...]:
        """The members and the spares."""
        return (*self._infos(), *self._spares.infos.values())

    def replace(self, ranks: Sequence[int]) -> None:
        """Give each of ``ranks``, which are lost, a new worker: a spare if one is ready, or else one to wait for.

        Raises:
            NoWorkersError: not in time, or each new worker dies at once.
            Interrupted: a stop was requested.
        """
        while len(spares := self._answering_spares()) < len(ranks):
            self.wait_for_spares(len(ranks), f"{_workers(len(ranks))} in place of those that failed")
        workers = [(m.slot, m.info) for m in self.members]
        for rank in ranks:
            node_id = self.members[rank].info.node_id
            spare = next((s for s in spares if self._spares.infos[s].node_id == node_id), spares[0])
            spares.remove(spare)
            workers[rank] = spare, self._spares.infos.pop(spare)
        self._assign_ranks(workers)
        self._check_devices(self._infos())

    def wait_for_spares(self, count: int, wanted: str) -> None:
        """Start workers wherever there is room until ``count`` could take a rank, and wait for them.

        Raises:
            NoWorkersError: not in time, or each new worker dies at once.
            Interrupted: a stop was requested.
        """
        given_up = self._spares.num_given_up
        self.advance_spares()
        wait = self._wait_for(wanted, max(1, count - self.ready()))
        while (missing := count - self.ready()) > 0:
            if self._spares.num_given_up > given_up:
                raise calls.NoWorkersError(f"{START_ATTEMPTS} workers in a row died while they started; see Ray's logs")
            self._nodes.note_dead()
            self._spares.seek(missing)
            wait.check()
            self._spares.wait(SPARES_POLL_S)
            self.advance_spares()

    def reassign_ranks(self, plan: Plan, before: Sequence[int | None]) -> bool:
        """Change to ``plan``, whose ranks go to present members and spares.

        Args:
            plan: the plan of the next generation, of another size.
            before: for each new rank the present rank of its worker; None for a spare.

        Returns:
            False if there are too few live spares; nothing has changed then.
        """
        spares = self._answering_spares() if None in before else []
        if len(spares) < before.count(None):
            return False
        joining = iter(spares)
        workers = []
        for rank in before:
            if rank is None:
                slot = next(joining)
                workers.append((slot, self._spares.infos.pop(slot)))
            else:
                workers.append((self.members[rank].slot, self.members[rank].info))
        for member in self.members:
            if member.global_rank not in self._lost.union(before):
                self._vacate(member)
        self._plan = plan
        self._assign_ranks(workers)
        self._check_devices(self._infos())
        return True

    def refill(self, workers: int) -> None:
        """Start workers in the background until there are ``workers``, members included, and give back what is beyond.

        New workers, and spares that have not done so, load what every rank needs. Do not call this while a generation
        starts: loading takes CPU time from it. A slot in which :data:`START_ATTEMPTS` workers in a row died counts as
        one of them for a while.
        """
        self.advance_spares()
        self._spares.prepare()
        self._spares.retry()
        self._spares.refill(workers - len(self.members))

    def advance_spares(self) -> None:
        """Start workers on newly admitted nodes, and take over the started ones as spares."""
        self._spares.advance(self._infos())

    def ready(self) -> int:
        """Return how many spares could take a rank at once, as far as :meth:`advance_spares` knew."""
        return len(self._spares.fit(self._infos()))

    def kill(self, rank: int) -> None:
        """Kill the process of a rank at once, even if it is stopped."""
        member = self.members[rank]
        kill_process(member.info)
        self._slots.kill(member.slot)

    def _check_devices(self, infos: Sequence[WorkerInfo]) -> None:
        error = unusable_gpus(infos, self._config.device)
        if error is None and SHARED_GPU not in os.environ:
            error = shared_gpu(infos)
        if error is not None:
            raise calls.GangError(error)

    def _request(self, count: int) -> Request:
        return Request(count=count, each=self._slots.resources, one_node=self._plan.one_node)

    def _wait_for(self, wanted: str, count: int, *, unfit_timeout_s: float | None = None) -> ResourceWait:
        return ResourceWait(
            wanted,
            self._request(count),
            self._config,
            self._monitor,
            label=self._label,
            trouble=self._admission.trouble,
            unfit_timeout_s=unfit_timeout_s,
        )

    def _answering_spares(self) -> list[int]:
        """Return the slots of the spares that can take a rank and answer at once; the silent ones are discarded."""
        self.advance_spares()
        self._spares.discard_silent()
        return self._spares.fit(self._infos())

    def _vacate(self, member: Member) -> None:
        self._spares.vacate(member.slot, member.info.node_id)

    def _assign_ranks(self, workers: Sequence[tuple[int, WorkerInfo]]) -> None:
        """Make members of the workers, each with its slot, in the order of their ranks."""
        members = tuple(
            Member(global_rank=rank, actor=self._slots.actor(slot), info=info, slot=slot)
            for rank, (slot, info) in enumerate(workers)
        )
        self._assign(members)
        self._lost = set()


def _workers(count: int) -> str:
    return "a worker" if count == 1 else f"{count} workers"

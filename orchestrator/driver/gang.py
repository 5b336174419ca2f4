"""The gang: the workers of a run, acquired and released together, replaced one by one."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, cast

import ray
import ray.exceptions

from orchestrator.driver.calls import GangError, all_answers, answers_in_time, cause_of_death, describe_error
from orchestrator.driver.node_watch import NodeWatch
from orchestrator.driver.slots import START_ATTEMPTS, Slots, kill_process
from orchestrator.driver.start_wait import wait_for_actors
from orchestrator.driver.waiting import ResourceWait, WaitMonitor
from orchestrator.driver.worker_code import WorkerCode
from orchestrator.planning.plan import Plan
from orchestrator.policy.devices import can_join, shared_gpu, unusable_gpus
from orchestrator.policy.rank_order import rank_order, shards_last
from orchestrator.protocol.messages import Heartbeat, Variables, WorkerEnvironment, WorkerInfo, merged

HEARTBEATS_PER_ROUND = 64
"""Members asked in one round. Larger gangs need several rounds until each rank has been heard."""
SPARE_TIMEOUT_S = 1.0
"""Discard spares that do not answer within this time."""
SHARED_GPU = "ORCHESTRATOR_TEST_SHARED_GPU"
"""Environment variable for the tests of this project alone: if set, several workers may use one GPU."""

WorkerMethod = Any
"""A method of :class:`~orchestrator.worker.actor.Worker`, such as ``Worker.hold``, as Ray's decorator returns it."""


@dataclass(frozen=True)
class Member:
    """A worker with a rank: its actor, where that runs, and in which slot."""

    global_rank: int
    actor: Any
    info: WorkerInfo
    slot: int


class Gang:
    """All workers of a run. Use as a context manager, which releases everything on exit.

    ``members``: the workers with a rank, by rank. The spares are kept apart.
    ``failed_heartbeats``: by rank, the errors of the last round of heartbeats in which a worker lives.
    """

    def __init__(
        self,
        plan: Plan,
        environment: WorkerEnvironment,
        code: WorkerCode,
        nodes: NodeWatch,
        monitor: WaitMonitor,
        *,
        variables: Variables,
        label: str,
    ):
        self.members: tuple[Member, ...] = ()
        self.failed_heartbeats: dict[int, ray.exceptions.RayError] = {}
        self._plan = plan
        self._nodes = nodes
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
        self._starting: dict[Any, int] = {}  # by the reference to a worker's info, which is not ready yet: its slot
        self._spares: dict[int, WorkerInfo] = {}  # by slot
        self._unprepared: set[int] = set()  # slots of spares
        self._vacant: list[int] = []
        self._failed_starts: Counter[int] = Counter()  # by slot: those in a row
        self._given_up: set[int] = set()  # slots in which no worker starts
        self._pending_heartbeats: dict[Any, int] = {}  # by reference: the rank
        self._last_heartbeats: dict[int, Heartbeat] = {}  # by rank: those that came with outcomes, to be returned
        self._next_asked = 0  # the rank with which the next round of heartbeats begins

    def __enter__(self) -> Gang:
        return self

    def __exit__(self, *_: object) -> None:
        self._slots.release()
        self.members = ()

    def acquire(self) -> None:
        """Reserve the resources, start the actors, and assign the ranks.

        Raises:
            GangError: not in time, a GPU cannot be used, or two workers landed on one GPU.
            Interrupted: a stop was requested.
        """
        plan = self._plan
        wait = self._wait_for(f"{plan.world_size} workers")
        slots = self._slots.reserve_all(plan.world_size + plan.spares, one_node=plan.one_node, wait=wait)
        hosts = self._slots.host_names(slots)
        infos = wait_for_actors(
            {self._slots.start(slot): host for slot, host in zip(slots, hosts, strict=True)},
            timeout_s=self._config.start_timeout_s,
            pip=self._code.pip,
            monitor=self._monitor,
        )
        self._check_devices(infos)
        order = rank_order(infos)
        by_rank = shards_last(infos, order[: plan.world_size], num_shards=plan.mesh.num_shards)
        self._assign_ranks([(slots[index], infos[index]) for index in by_rank])
        self._spares = {slots[index]: infos[index] for index in order[plan.world_size :]}
        self._unprepared = set(self._spares)

    def replace(self, ranks: Sequence[int]) -> None:
        """Give each of ``ranks`` another worker: a spare, or else a new actor in the same slot.

        A worker on a draining node is replaced by one on another node.

        Raises:
            GangError: not in time, or each new worker dies at once.
            Interrupted: a stop was requested.
        """
        draining = self._nodes.draining
        workers = [(m.slot, m.info) for m in self.members]
        without_spare: dict[int, int] = {}  # by rank: the slot for its new worker
        spares = self._live_spares()
        for rank in ranks:
            lost = self.members[rank]
            self._slots.kill(lost.slot)
            if spares:
                spare = next((s for s in spares if self._spares[s].node_id == lost.info.node_id), spares[0])
                spares.remove(spare)
                workers[rank] = spare, self._spares.pop(spare)
                self._vacate(lost, draining)
            else:
                without_spare[rank] = self._slots.reserve() if lost.info.node_id in draining else lost.slot
        if without_spare:
            wait = self._wait_for(f"{_workers(len(without_spare))} in place of those lost")
            infos = self._slots.start_and_wait(list(without_spare.values()), wait)
            workers = [(s, infos[s]) if (s := without_spare.get(r)) is not None else w for r, w in enumerate(workers)]
        self._assign_ranks(workers)
        self._check_devices([m.info for m in self.members])

    def reassign_ranks(self, plan: Plan, before: Sequence[int | None]) -> bool:
        """Change to ``plan``, whose ranks go to present members and spares.

        Args:
            plan: the plan of the next generation, of another size.
            before: for each new rank the present rank of its worker; None for a spare.

        Returns:
            False if there are too few live spares; nothing has changed then.
        """
        spares = self._live_spares() if None in before else []
        if len(spares) < before.count(None):
            return False
        joining = iter(spares)
        slots = [next(joining) if rank is None else self.members[rank].slot for rank in before]
        infos = {m.slot: m.info for m in self.members} | self._spares
        draining = self._nodes.draining
        for member in self.members:
            if member.global_rank not in before:
                self._slots.kill(member.slot)
                self._vacate(member, draining)
        for slot in slots:
            self._spares.pop(slot, None)
        self._plan = plan
        self._assign_ranks([(slot, infos[slot]) for slot in slots])
        self._check_devices([m.info for m in self.members])
        return True

    def refill(self, workers: int) -> None:
        """Start workers in the background until there are ``workers``, members included.

        Vacant slots come first, then new ones wherever the cluster has room or will have it. New workers, and spares
        that have not done so, load what every rank needs. Do not call this while a generation starts: loading takes
        CPU time from it. A slot in which :data:`START_ATTEMPTS` workers in a row died counts as one of them.
        """
        for slot in self._unprepared.intersection(self._spares):
            self._slots.actor(slot).prepare.remote(self._environment)
        self._unprepared = set()
        present = len(self.members) + len(self._starting) + len(self._spares) + len(self._given_up)
        for _ in range(workers - present):
            slot = self._vacant.pop() if self._vacant else self._slots.reserve()
            self._slots.start(slot)
            self._starting[self._slots.actor(slot).prepare.remote(self._environment)] = slot

    def ready(self) -> int:
        """Return how many spares could take a rank at once."""
        starting = list(self._starting)
        for reference in ray.wait(starting, num_returns=len(starting), timeout=0)[0] if starting else ():
            slot = self._starting.pop(reference)
            try:
                self._spares[slot] = cast(WorkerInfo, ray.get(reference))
                del self._failed_starts[slot]
            except ray.exceptions.RayError as e:
                self._record_failed_start(slot, e)
            else:
                if not self._can_join(spare := self._spares[slot]):
                    self._monitor.warn(f"an additional worker on {spare.hostname} can take no rank: {spare.gpu_error}")
        return len(self._fit_spares())

    def heartbeats(
        self, *, with_system_metrics: bool, wait_s: float, ranks: Collection[int] | None = None
    ) -> dict[int, Heartbeat]:
        """Ask members for a heartbeat and return those that come within ``wait_s`` seconds, by rank.

        A later answer is merged into the rank's next one. The heartbeat of an outcome is returned as well, but not
        before the rank's pending one, so that reports stay in order.

        Args:
            with_system_metrics: whether the first member of each node adds the system metrics of its node.
            wait_s: how long to wait for answers.
            ranks: the ranks to ask. None for the next :data:`HEARTBEATS_PER_ROUND` members, so that the cost of a round
                does not grow with the gang.
        """
        errors: dict[int, ray.exceptions.RayError] = {}
        answers: list[tuple[int, Heartbeat]] = list(
            answers_in_time(self._pending_heartbeats, 0.0, errors=errors).items()
        )
        reporting: set[int] = set()
        if with_system_metrics:
            reporting = set({m.info.node_id: m.global_rank for m in reversed(self.members)}.values())
        asked = self._next_in_turn() | reporting if ranks is None else set(ranks)
        for rank in sorted(asked - self.unanswered()):
            answer = self.members[rank].actor.heartbeat.remote(rank in reporting)
            self._pending_heartbeats[answer] = rank
        awaited = {r: rank for r, rank in self._pending_heartbeats.items() if ranks is None or rank in ranks}
        others = {r: rank for r, rank in self._pending_heartbeats.items() if r not in awaited}
        answers += answers_in_time(awaited, wait_s, errors=errors).items()
        self._pending_heartbeats = others | awaited
        self.failed_heartbeats = {rank: e for rank, e in errors.items() if cause_of_death(e) is None}
        complete = self._last_heartbeats.keys() - self.unanswered()
        answers += [(rank, self._last_heartbeats.pop(rank)) for rank in complete]
        return merged(answers)

    def add_last_heartbeat(self, rank: int, heartbeat: Heartbeat) -> None:
        """Add the heartbeat that came with an outcome to those that :meth:`heartbeats` returns."""
        self._last_heartbeats[rank] = heartbeat

    def unanswered(self) -> set[int]:
        """Return the ranks that have been asked for a heartbeat and have not answered yet."""
        return set(self._pending_heartbeats.values())

    def ask_one(
        self, rank: int, method: WorkerMethod, *args: Any, timeout_s: float, check: Callable[[], None] | None = None
    ) -> Any:
        """Call ``method`` of one member and return its answer; ``check()`` runs meanwhile.

        Raises:
            NoAnswerError: not in time.
            GangError: Ray is dead.
            RayError: the worker is dead, or could not carry out the call.
        """
        return all_answers([_call(self.members[rank], method, *args)], timeout_s, check=check)[0]

    def poll(
        self,
        method: WorkerMethod,
        *args: Any,
        ranks: Collection[int],
        timeout_s: float,
        check: Callable[[], None] | None = None,
    ) -> dict[int, Any]:
        """Call ``method`` of some members and return the answers that come in time, by rank.

        ``check()`` runs meanwhile, and may raise to stop waiting.
        """
        pending = {_call(m, method, *args): m.global_rank for m in self.members if m.global_rank in ranks}
        return answers_in_time(pending, timeout_s, check=check)

    def tell(self, method: WorkerMethod, *args: Any, ranks: Collection[int]) -> None:
        """Call ``method`` of some members without waiting for an answer."""
        for member in self.members:
            if member.global_rank in ranks:
                _call(member, method, *args)

    def kill(self, rank: int) -> None:
        """Kill the process of a rank at once, even if it is stopped."""
        member = self.members[rank]
        kill_process(member.info)
        self._slots.kill(member.slot)

    def _next_in_turn(self) -> set[int]:
        """Return the ranks to ask in the next round."""
        world_size = len(self.members)
        count = min(world_size, HEARTBEATS_PER_ROUND)
        first, self._next_asked = self._next_asked, (self._next_asked + count) % world_size
        return {(first + i) % world_size for i in range(count)}

    def _check_devices(self, infos: Sequence[WorkerInfo]) -> None:
        error = unusable_gpus(infos, self._config.device)
        if error is None and SHARED_GPU not in os.environ:
            error = shared_gpu(infos)
        if error is not None:
            raise GangError(error)

    def _can_join(self, spare: WorkerInfo) -> bool:
        return can_join(spare, [m.info for m in self.members])

    def _wait_for(self, what: str) -> ResourceWait:
        return ResourceWait(
            what, self._plan, label=self._label, timeout_s=self._config.pending_timeout_s, monitor=self._monitor
        )

    def _vacate(self, lost: Member, draining: Collection[str]) -> None:
        if lost.info.node_id not in draining:
            self._vacant.append(lost.slot)

    def _record_failed_start(self, slot: int, error: ray.exceptions.RayError) -> None:
        self._failed_starts[slot] += 1
        if self._failed_starts[slot] < START_ATTEMPTS:
            self._vacant.append(slot)
            return
        if not self._given_up:
            self._monitor.warn(
                f"{START_ATTEMPTS} additional workers in a row died while they started ({describe_error(error)}); the "
                "run continues with fewer; see Ray's logs"
            )
        self._given_up.add(slot)

    def _live_spares(self) -> list[int]:
        """The slots of the spares that answer and are not on a draining node, in ascending order."""
        self.ready()
        alive = answers_in_time(
            {self._slots.actor(slot).worker_info.remote(): slot for slot in self._spares}, SPARE_TIMEOUT_S
        )
        for slot in set(self._spares).difference(alive):
            self._slots.kill(slot)
            del self._spares[slot]
            self._vacant.append(slot)
        return self._fit_spares()

    def _fit_spares(self) -> list[int]:
        """The slots of the spares that could take a rank, in ascending order."""
        draining = self._nodes.draining
        return sorted(s for s, info in self._spares.items() if info.node_id not in draining and self._can_join(info))

    def _assign_ranks(self, workers: Sequence[tuple[int, WorkerInfo]]) -> None:
        """Make members of the workers, each with its slot, in the order of their ranks."""
        members = tuple(
            Member(global_rank=rank, actor=self._slots.actor(slot), info=info, slot=slot)
            for rank, (slot, info) in enumerate(workers)
        )
        unchanged = {m.global_rank for m, before in zip(members, self.members, strict=False) if m.info == before.info}
        self.members = members
        self._pending_heartbeats = {r: rank for r, rank in self._pending_heartbeats.items() if rank in unchanged}
        self._last_heartbeats = {rank: h for rank, h in self._last_heartbeats.items() if rank in unchanged}
        self._next_asked = 0


def _call(member: Member, method: WorkerMethod, *args: Any) -> Any:
    return getattr(member.actor, method.__name__).remote(*args)


def _workers(count: int) -> str:
    return "a worker" if count == 1 else f"{count} workers"

"""Workers without a rank: ready to take one, or starting in the background.

They start on nodes that are each asked once, whenever they join the cluster (:class:`Admission`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from typing import Any, cast

import ray
import ray.exceptions

from orchestrator.compat.ray.connection import is_own_ray
from orchestrator.driver.code.worker_code import WorkerCode
from orchestrator.driver.gang.slots import Slots
from orchestrator.driver.nodes.node_reports import ask_nodes, driver_report, reports_in_time
from orchestrator.driver.nodes.node_watch import NodeWatch
from orchestrator.driver.process import cluster
from orchestrator.driver.process.calls import answers_in_time, check_ray, describe_error
from orchestrator.driver.process.run_context import RunSpec
from orchestrator.driver.process.waiting import WaitMonitor
from orchestrator.planning.plan import Node
from orchestrator.policy.node_check import check_sharing, differences, fault_lines
from orchestrator.policy.worker_gpus import can_join
from orchestrator.protocol.messages import WorkerEnvironment, WorkerInfo
from orchestrator.protocol.node_report import NodeReport, NoReport

START_ATTEMPTS = 3
"""Give a slot up after this many workers in a row died in it while they started."""
RETRY_AFTER_S = 600.0
"""Use a slot again that was given up so long ago, because an outage ends."""
LOOKED_UP_AT_ONCE = 64
"""Look up the nodes of this many slots at a time, because each takes a call to Ray."""
SPARE_TIMEOUT_S = 1.0
"""Discard spares that do not answer within this time."""


class Spares:
    """The spares of a run, and the slots in which more of them could start.

    A slot is vacant if its worker is gone. It is stranded if its node was lost, drains or is not admitted: Ray moves it
    to another node when it has found the node dead and has room for all such slots that were reserved together. A
    worker that is started there may come up late, or never. A worker is started in a slot when Ray has placed it on a
    node that is admitted.

    Attributes:
        infos: the spares that have started, by slot.
    """

    def __init__(
        self,
        slots: Slots,
        nodes: NodeWatch,
        admission: Admission,
        environment: WorkerEnvironment,
        monitor: WaitMonitor,
        *,
        one_node: bool,
    ):
        self._slots = slots
        self._nodes = nodes
        self._admission = admission
        self._environment = environment
        self._monitor = monitor
        self._one_node = one_node
        self.forget()

    def forget(self) -> None:
        """Forget all spares and slots, which the gang has released."""
        self.infos: dict[int, WorkerInfo] = {}
        self._given_up: dict[int, tuple[float, bool]] = {}  # by slot: when, and whether it was given back
        self._waiting: list[int] = []  # slots in which workers start when their nodes are known and admitted
        self._avoided: dict[int, frozenset[str]] = {}  # by slot that waits for a node: those it must not get
        self._starting: dict[Any, int] = {}  # by the reference to a worker's info, which is not ready yet: its slot
        self._unprepared: set[int] = set()
        self._vacant: list[int] = []
        self._node_before: dict[int, str] = {}  # by slot: the id of the node on which it was when it became vacant
        self._failed_starts: Counter[int] = Counter()  # by slot: those in a row

    @property
    def num_given_up(self) -> int:
        """The number of slots in which no worker starts."""
        return len(self._given_up)

    def retry(self) -> None:
        """Forget the slots that were given up long ago, so that workers are started in their place."""
        for slot, (at, given_back) in list(self._given_up.items()):
            if time.monotonic() - at >= RETRY_AFTER_S:
                del self._given_up[slot], self._failed_starts[slot]
                self._vacant += [] if given_back else [slot]

    def begin(self, infos: Mapping[int, WorkerInfo]) -> None:
        """Take over the spares that were started together with the members, by slot."""
        self.infos |= infos
        self._unprepared |= infos.keys()

    def vacate(self, slot: int, node_id: str) -> None:
        """Kill what is left in ``slot``, and leave it to another worker, unless its node is draining."""
        self.infos.pop(slot, None)
        if self._one_node or node_id not in self._nodes.draining:
            self._slots.kill(slot)
            self._vacant.append(slot)
            self._node_before[slot] = node_id
        else:
            self._withdraw_or_strand(slot, node_id)

    def vacate_lost_nodes(self) -> None:
        """Give up the spares on lost nodes."""
        for slot, info in list(self.infos.items()):
            if info.node_id in self._nodes.lost:
                self.vacate(slot, info.node_id)

    def prepare(self) -> None:
        """Let the spares that have not done so load what every rank needs."""
        for slot in self._unprepared.intersection(self.infos):
            self._slots.actor(slot).prepare.remote(self._environment)
        self._unprepared = set()

    def refill(self, count: int) -> None:
        """Have ``count`` spares, ready or starting. Slots beyond that are given back if they were reserved alone.

        A slot that was given up counts as one of them.
        """
        missing = count - len(self.infos) - self.num_given_up
        self._end_starts(missing)
        if missing > 0:
            self.seek(missing)
            return
        for slot in filter(self._slots.is_alone, list(self._vacant)):
            self._withdraw(slot)
            self._vacant.remove(slot)
        beyond = max(0, len(self.infos) - count)
        for slot in list(filter(self._slots.is_alone, self.infos))[:beyond]:
            self._withdraw(slot)
            del self.infos[slot]
            self._unprepared.discard(slot)

    def seek(self, missing: int) -> None:
        """Have at least ``missing`` workers starting, besides those in stranded slots.

        Vacant slots come first, then new ones wherever the cluster has room or will have it.
        """
        for slot in self._stranded(self._vacant):
            self._vacant.remove(slot)
            self._waiting.append(slot)
        self._withdraw_outdated()
        unready = [*self._waiting, *self._starting.values()]
        hopeful = len(unready) - len(self._stranded(unready))
        for _ in range(missing - hopeful):
            self._waiting.append(self._vacant.pop() if self._vacant else self._reserve())
        self._start_admitted()

    def wait(self, timeout_s: float) -> None:
        """Wait until one of those that are starting has started or has failed to, or until it is time to look again."""
        if self._starting:
            ray.wait(list(self._starting), timeout=timeout_s)
        else:
            time.sleep(timeout_s)

    def advance(self, members: Sequence[WorkerInfo]) -> None:
        """Start workers on newly admitted nodes, and take over the started ones.

        ``members``: the workers with a rank, beside whom they would take one.
        """
        self._start_admitted()
        starting = list(self._starting)
        for reference in ray.wait(starting, num_returns=len(starting), timeout=0)[0] if starting else ():
            slot = self._starting.pop(reference)
            try:
                info = cast(WorkerInfo, ray.get(reference))
            except ray.exceptions.RayError as e:
                self._record_failed_start(slot, e)
            else:
                self._record_start(slot, info, members)

    def discard_silent(self) -> None:
        """Discard the spares that do not answer at once."""
        answers = answers_in_time(
            {self._slots.actor(slot).worker_info.remote(): slot for slot in self.infos}, SPARE_TIMEOUT_S
        )
        for slot in self.infos.keys() - answers:
            self.vacate(slot, self.infos[slot].node_id)

    def fit(self, members: Sequence[WorkerInfo]) -> list[int]:
        """Return the slots of the spares that could take a rank beside ``members``, in ascending order."""
        trouble = self._nodes.trouble()
        return sorted(s for s, info in self.infos.items() if info.node_id not in trouble and can_join(info, members))

    def _stranded(self, slots: Iterable[int]) -> list[int]:
        """Return which ``slots`` are stranded; none if all workers must share a node."""
        trouble = {} if self._one_node else self._admission.trouble()
        return [slot for slot in slots if self._node_before.get(slot) in trouble]

    def _reserve(self) -> int:
        avoided = frozenset(self._admission.trouble())
        slot = self._slots.reserve(avoid=avoided)
        self._avoided[slot] = avoided
        return slot

    def _withdraw_outdated(self) -> None:
        """Give back the slots without a node that avoid others than they would now: a late node may have answered."""
        self._avoided = {slot: avoided for slot, avoided in self._avoided.items() if slot in self._waiting}
        changed = {avoided for avoided in set(self._avoided.values()) if self._admission.has_changed(avoided)}
        outdated = [slot for slot, avoided in self._avoided.items() if avoided in changed]
        for slot in set(outdated).difference(self._slots.placed(outdated)):
            self._waiting.remove(slot)
            self._withdraw(slot)

    def _start_admitted(self) -> None:
        """Start workers in the slots on admitted nodes, and leave those on refused ones."""
        looked_up, later = self._waiting[:LOOKED_UP_AT_ONCE], self._waiting[LOOKED_UP_AT_ONCE:]
        self._waiting = later + looked_up
        for slot, node_id in self._slots.placed(looked_up).items():
            is_leaving = not self._one_node and node_id in self._nodes.draining
            admitted = False if is_leaving else self._admission.admits(node_id)
            if admitted is None:
                continue
            self._waiting.remove(slot)
            if admitted:
                self._slots.start(slot)
                self._starting[self._slots.actor(slot).prepare.remote(self._environment)] = slot
            else:
                self._withdraw_or_strand(slot, node_id)

    def _end_starts(self, missing: int) -> None:
        """Have at most ``missing`` workers starting, besides those in stranded slots, or none if none is missing."""
        unready = [*self._starting.values(), *self._waiting]
        stranded = set(self._stranded(unready))
        surplus = [slot for slot in unready if slot not in stranded][missing:] if missing > 0 else unready
        self._waiting = [slot for slot in self._waiting if slot not in surplus]
        self._starting = {reference: slot for reference, slot in self._starting.items() if slot not in surplus}
        self._vacant += [slot for slot in surplus if not self._withdraw(slot)]

    def _withdraw(self, slot: int) -> bool:
        """Kill the worker in ``slot``, and give the slot back if it was reserved alone; returns whether it was."""
        if not self._slots.withdraw(slot):
            return False
        self._node_before.pop(slot, None)
        return True

    def _withdraw_or_strand(self, slot: int, node_id: str) -> None:
        """Kill the worker in ``slot`` on a node where none may start, and give the slot back if that is possible.

        Otherwise a worker starts in it when its node is admitted, or Ray has moved it to one that is.
        """
        if not self._withdraw(slot):
            self._node_before[slot] = node_id
            self._waiting.append(slot)

    def _record_start(self, slot: int, info: WorkerInfo, members: Sequence[WorkerInfo]) -> None:
        if not self._admission.admits(info.node_id):
            # Ray has moved the slot from a lost node while the worker was to start there.
            self._slots.kill(slot)
            self._waiting.append(slot)
            return
        self.infos[slot] = info
        del self._failed_starts[slot]
        if info.node_id == self._node_before.pop(slot, None):
            self._nodes.lost.discard(info.node_id)
        if not can_join(info, members):
            self._monitor.warn(f"an additional worker on {info.hostname} can take no rank: {info.gpu_error}")

    def _record_failed_start(self, slot: int, error: ray.exceptions.RayError) -> None:
        if self._stranded([slot]):
            self._vacant.append(slot)
            return
        self._failed_starts[slot] += 1
        if self._failed_starts[slot] < START_ATTEMPTS:
            self._vacant.append(slot)
            return
        if not self._given_up:
            self._monitor.warn(
                f"{START_ATTEMPTS} additional workers in a row died while they started ({describe_error(error)}); the "
                "run continues with fewer; see Ray's logs"
            )
        self._given_up[slot] = time.monotonic(), self._withdraw(slot)


POLL_S = 0.1


class Admission:
    """Admits nodes to a run, or refuses them with a warning that names the fault and its remedy.

    The nodes that were checked before the run are admitted. Ray must be connected.
    """

    def __init__(self, spec: RunSpec, code: WorkerCode, nodes: NodeWatch, monitor: WaitMonitor):
        self._spec = spec
        self._config = spec.config.cluster
        self._code = code
        self._nodes = nodes
        self._monitor = monitor
        self._admitted = set(spec.checked_nodes)
        if is_own_ray():
            self._admitted.add(ray.get_runtime_context().get_node_id())
        self._refused: dict[str, str] = {}  # by node id: why
        self._pending: dict[Any, Node] = {}  # by pending report
        self._asked_at: dict[str, float] = {}  # by node id
        self._late: set[str] = set()  # node ids

    def trouble(self) -> Mapping[str, str]:
        """Return why no worker should start on some nodes, by node id."""
        excluded = cluster.excluded_nodes(self._config.exclude_nodes)
        return {
            **self._nodes.trouble(),
            **dict.fromkeys(excluded, "is left out by cluster.exclude_nodes"),
            **dict.fromkeys(self._late, "does not answer"),
            **self._refused,
        }

    def has_changed(self, avoided: Set[str]) -> bool:
        """Return whether the nodes with trouble are others than those in ``avoided``, by the reports until now."""
        self._collect_reports()
        return self.trouble().keys() != avoided

    def admits(self, node_id: str) -> bool | None:
        """Return whether workers may start on the node; None until it has reported. Asks it at the first call."""
        self._collect_reports()
        if node_id in self._admitted:
            return True
        if node_id in self.trouble():
            return False
        if node_id not in self._asked_at:
            self._ask(node_id)
        return None

    def admits_all(self, node_ids: Collection[str]) -> bool:
        """Wait until all of the nodes have reported, and return whether workers may start on each of them.

        Raises:
            GangError: Ray is dead.
            Interrupted, SupersededError, TurnLostError: see :meth:`WaitMonitor.check`.
        """
        while None in (answers := {self.admits(node_id) for node_id in node_ids}):
            self._monitor.check()
            check_ray()
            time.sleep(POLL_S)
        return False not in answers

    def _ask(self, node_id: str) -> None:
        if (node := _living(node_id)) is None:
            self._nodes.lost.add(node_id)
            return
        config, run_dir = self._spec.config, self._spec.run_dir
        self._asked_at[node_id] = time.monotonic()
        self._pending |= ask_nodes(
            [node],
            job_modules=sorted(config.modules(with_job=self._spec.pickled_job is None)),
            code=self._code,
            output_dir=str(run_dir.path) if run_dir.remote is None else None,
            nonce=run_dir.record_file.name,
        )

    def _collect_reports(self) -> None:
        for node, report in reports_in_time(self._pending, 0.0).items():
            self._late.discard(node.node_id)
            self._decide(node, report)
        timeout_s = self._config.rendezvous_timeout_s
        for node in self._pending.values():
            if node.node_id not in self._late and time.monotonic() - self._asked_at[node.node_id] > timeout_s:
                self._late.add(node.node_id)
                self._monitor.warn(
                    f"{node.place} has not answered for {timeout_s:g} s (cluster.rendezvous_timeout_s); no worker "
                    "starts there until it does"
                )

    def _decide(self, node: Node, report: NodeReport | NoReport) -> None:
        faults = list(differences(report, driver_report()))
        if isinstance(report, NodeReport):
            faults += check_sharing(report, self._spec.config.output_dir)
        if not faults:
            self._admitted.add(node.node_id)
        elif _living(node.node_id) is None:
            self._nodes.lost.add(node.node_id)
        else:
            self._refused[node.node_id] = f"is left out: {'; '.join(fault.text for fault in faults)}"
            self._monitor.warn(f"a node is left out until Ray is restarted there: {'; '.join(fault_lines(faults))}")


def _living(node_id: str) -> Node | None:
    return next((node for node in cluster.nodes() if node.node_id == node_id), None)

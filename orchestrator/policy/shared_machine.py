"""What other programs used of the machines of a run while its steps were timed. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from orchestrator.protocol.machine_use import IDLE_CPU_PCT, OTHERS_CPU_PCT, OTHERS_GPU_PCT, MachineUse


@dataclass
class _Node:
    own_s: float = 0.0
    busy_s: dict[int, float] = field(default_factory=lambda: defaultdict(float))  # as each rank has measured it
    idle_s: dict[int, float] = field(default_factory=lambda: defaultdict(float))


class SharedMachine:
    """Collects the readings of all ranks.

    Ranks on one node measure the same node at about the same times, so the longest measurement of it counts.
    """

    def __init__(self) -> None:
        self._nodes: defaultdict[str, _Node] = defaultdict(_Node)
        self._gpu_pct: defaultdict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])  # by rank: sum and number

    def add(self, rank: int, node_id: str, use: MachineUse) -> None:
        """Add the reading of a rank; ``node_id``: where it ran."""
        node = self._nodes[node_id]
        node.own_s += use.own_s
        node.busy_s[rank] += use.busy_s
        node.idle_s[rank] += use.idle_s
        if use.others_gpu_pct is not None:
            self._gpu_pct[rank][0] += use.others_gpu_pct
            self._gpu_pct[rank][1] += 1

    def summary(self, *, driver_node: str, driver_s: float) -> Mapping[str, float]:
        """Return the shares, in percent, that others used and that stood idle; empty if nothing was measured.

        Args:
            driver_node: the id of the node of the driver.
            driver_s: the CPU seconds of the driver in the same time.
        """
        found = []
        for node_id, node in self._nodes.items():
            rank = max(node.busy_s, key=lambda r: node.busy_s[r] + node.idle_s[r])
            busy_s, idle_s = node.busy_s[rank], node.idle_s[rank]
            if busy_s + idle_s > 0:
                own_s = node.own_s + (driver_s if node_id == driver_node else 0.0)
                share = 100 / (busy_s + idle_s)
                found.append((max(0.0, busy_s - own_s) * share, idle_s * share))
        summary = dict(zip((OTHERS_CPU_PCT, IDLE_CPU_PCT), max(found), strict=True)) if found else {}
        gpus = [total / number for total, number in self._gpu_pct.values()]
        return {**summary, OTHERS_GPU_PCT: max(gpus)} if gpus else summary

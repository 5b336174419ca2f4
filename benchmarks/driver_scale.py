"""The cost of the driver at 8 to 2,048 ranks: start, watching, healing after one of 128 ranks died, and end.

python benchmarks/driver_scale.py

The driver is the real one, with real Ray calls to every rank. The workers are simulated: two Ray actors answer for all
ranks, which train and log by the clock. So the times do not include the start of processes or the joining of process
groups. They do include the answers of the simulated workers, which share this machine with the driver, whereas real
workers answer in parallel. CPU times are those of whole processes, including Ray's threads in them.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import ray
from harness.rounds import Claim, argument_parser, interleave, report, table
from harness.simulated_gang import HOSTS, SimulatedSlots, prepared_run, simulated_gangs

SIZES = (8, 256, 1024, 2048)
ROUNDS = 2
LOST_SHARE = 1 / 128
WATCH_S = 10.0
TIMEOUT_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What one simulated run cost.

    Attributes:
        watching: the share of a core that the driver used in steady training.
        heal_s: from the death of the workers until the driver has seen the next step.
        heal_cpu_s: the CPU time of the driver meanwhile.
        workers_cpu_s: the CPU time of the simulated workers meanwhile.
    """

    world_size: int
    start_s: float
    watching: float
    lost: int
    heal_s: float
    heal_cpu_s: float
    workers_cpu_s: float
    restarted: int
    end_s: float

    def __str__(self) -> str:
        return f"{100 * self.watching:.1f} % of a core, {self.lost} lost workers healed in {self.heal_s:.2f} s"


def measure(world_size: int, folder: Path) -> Cost:
    """Run one simulated training under the real driver."""
    lost = max(1, round(LOST_SHARE * world_size))
    run, watcher = prepared_run(world_size, folder)
    thread = threading.Thread(target=run.execute)
    began = time.monotonic()
    thread.start()
    assert watcher.first_step.wait(TIMEOUT_S)
    start_s = time.monotonic() - began
    time.sleep(3.0)
    cpu, since = time.process_time(), time.monotonic()
    time.sleep(WATCH_S)
    watching = (time.process_time() - cpu) / (time.monotonic() - since)
    before = dict(SimulatedSlots.workers)
    workers_cpu_s = cpu_of_workers()
    cpu, died = time.process_time(), time.monotonic()
    for slot in range(1, 1 + lost):
        before[slot].die()
    assert watcher.healed.wait(TIMEOUT_S)
    heal_s, heal_cpu_s = time.monotonic() - died, time.process_time() - cpu
    workers_cpu_s = cpu_of_workers() - workers_cpu_s
    restarted = sum(SimulatedSlots.workers[slot] is not worker for slot, worker in before.items())
    time.sleep(1.0)
    ended = time.monotonic()
    ray.get([host.finish_all.remote() for host in SimulatedSlots.hosts])
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()
    return Cost(
        world_size=world_size,
        start_s=start_s,
        watching=watching,
        lost=lost,
        heal_s=heal_s,
        heal_cpu_s=heal_cpu_s,
        workers_cpu_s=workers_cpu_s,
        restarted=restarted,
        end_s=time.monotonic() - ended,
    )


def cpu_of_workers() -> float:
    """Return the CPU time of the simulated workers so far, in seconds."""
    return float(sum(ray.get([host.cpu_s.remote() for host in SimulatedSlots.hosts])))


def main() -> None:
    arguments = argument_parser(__doc__).parse_args()
    ray.init(num_cpus=HOSTS, include_dashboard=False, log_to_driver=False)
    arms = {ranks(size): partial(measure, size) for size in (SIZES[:2] if arguments.quick else SIZES)}
    with simulated_gangs():
        rounds = interleave(arms, rounds=1 if arguments.quick else ROUNDS)
    costs = {name: [r[name] for r in rounds] for name in arms}
    columns = {
        "start, s": "start_s",
        "CPU of the driver while healing, s": "heal_cpu_s",
        "CPU of the simulated workers, s": "workers_cpu_s",
        "workers started anew": "restarted",
        "end, s": "end_s",
    }
    rows = [
        [name, *(f"{statistics.median(asdict(cost)[key] for cost in of_size):.3g}" for key in columns.values())]
        for name, of_size in costs.items()
    ]
    report(
        "driver-scale",
        claims(costs),
        ceiling=None,
        rounds={},
        notes=table(["size", *columns], rows),
        keep=not arguments.quick,
    )


def ranks(world_size: int) -> str:
    return f"{world_size:,} ranks"


def claims(costs: Mapping[str, Sequence[Cost]]) -> list[Claim]:
    """Return the figures of each size, and the goals for 1,024 ranks."""
    large, smallest = ranks(1024), costs[ranks(SIZES[0])]
    found = []
    for name, of_size in costs.items():
        share = [cost.watching for cost in of_size]
        healed = [cost.heal_s for cost in of_size]
        found += [
            Claim(name=f"{name}: watching, share of a core", ratios=share, at_most=0.10 if name == large else math.inf),
            Claim(name=f"{name}: seconds to heal {of_size[0].lost}", ratios=healed),
        ]
        if name == large:
            relative = [s / cost.heal_s for s, cost in zip(healed, smallest, strict=True)]
            found.append(Claim(name=f"{name}: the same, relative to {ranks(SIZES[0])}", ratios=relative, at_most=2.0))
    return found


if __name__ == "__main__":
    main()

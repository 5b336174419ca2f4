"""The cost of the driver at 8 to 2,048 ranks: start, watching, healing after one of 128 ranks died, and end.

python benchmarks/driver_scale.py

The driver is the real one, with real Ray calls to every rank. The workers are simulated: two Ray actors answer for all
ranks, which train and log by the clock. So the times do not include the start of processes or the joining of process
groups. They do include the answers of the simulated workers, which share this machine with the driver, whereas real
workers answer in parallel. CPU times are those of whole processes, including Ray's threads in them.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import ray
from harness.disturbance import undisturbed
from harness.rounds import Claim, argument_parser, report, table
from harness.simulated_gang import HOSTS, SimulatedSlots, prepared_run, simulated_gangs

SIZES = (8, 64, 256, 1024, 2048)
LOST_SHARE = 1 / 128
WATCH_S = 20.0
TIMEOUT_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What one simulated run cost.

    ``watching``: the share of a core that the driver used in steady training.
    ``heal_s``: from the death of the workers until the driver has seen the next step.
    ``heal_cpu_s``, ``workers_cpu_s``: the CPU times of the driver and of the simulated workers meanwhile.
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

    def row(self) -> list[str]:
        return [
            f"{self.world_size:,}",
            f"{self.start_s:.2f}",
            f"{100 * self.watching:.1f} %",
            f"{self.lost}",
            f"{self.heal_s:.2f}",
            f"{self.heal_cpu_s:.2f}",
            f"{self.workers_cpu_s:.2f}",
            f"{self.restarted}",
            f"{self.end_s:.2f}",
        ]


def measure(world_size: int, lost: int) -> Cost:
    """Run one simulated training under the real driver."""
    with simulated_gangs(), tempfile.TemporaryDirectory(prefix="bench-") as folder:
        return measure_in(Path(folder), world_size, lost)


def measure_in(folder: Path, world_size: int, lost: int) -> Cost:
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
    costs = []
    for world_size in SIZES[:3] if arguments.quick else SIZES:
        costs.append(undisturbed(partial(measure, world_size, max(1, round(LOST_SHARE * world_size)))))
        print("  ".join(costs[-1].row()), flush=True)
    head = [
        "ranks",
        "start, s",
        "watching, of a core",
        "ranks lost",
        "healed in, s",
        "CPU of the driver while healing, s",
        "CPU of the simulated workers, s",
        "workers started anew",
        "end, s",
    ]
    report(
        "driver-scale",
        [] if arguments.quick else claims({cost.world_size: cost for cost in costs}),
        ceiling=None,
        rounds={},
        notes=table(head, [cost.row() for cost in costs]),
        keep=not arguments.quick,
    )


def claims(costs: Mapping[int, Cost]) -> list[Claim]:
    """Return the goals for 1,024 ranks."""
    large, small = costs[1024], costs[8]
    return [
        Claim(name="watching 1,024 ranks, share of a core", ratios=[large.watching], at_most=0.10),
        Claim(
            name=f"time to heal {large.lost} of 1,024 ranks / {small.lost} of 8",
            ratios=[large.heal_s / small.heal_s],
            at_most=2.0,
        ),
    ]


if __name__ == "__main__":
    main()

"""The driver with 1,024 and 16,384 ranks of which hosts fail: messages, CPU, time to decide, and goodput.

python benchmarks/failures_at_scale.py

The driver is the real one, and the workers are simulated as in ``driver_scale.py``, in which a step takes two seconds.
Hosts of eight ranks die at random times. So that minutes suffice, they do so thousands of times as often as one of
16,384 GPUs of Llama 3 did. What a failure costs here is then set against the time between failures there.
"""

from __future__ import annotations

import random
import statistics
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import ray
from harness.rounds import Claim, argument_parser, interleave, report, table
from harness.simulated_gang import HOSTS, SimulatedSlots, Watcher, prepared_run, simulated_gangs

from orchestrator.features.plan.prediction.forecast import DEVICE_HOURS, Reliability, goodput
from orchestrator.protocol.events import GenerationStarted, WorkerLost

SIZES = (1024, 16_384)
STEP_S = 2.0
OF_A_HOST = 8
FAILURES = 8
MEAN_GAP_S = 20.0
"""Between the end of a recovery and the next failure."""
WATCH_S = 20.0
TIMEOUT_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Failure:
    """What a failure cost, in seconds since it: the verdict, the orders for the next generation, and its first step.

    Attributes:
        repeated: steps that were made again.
    """

    decided_s: float
    ordered_s: float
    healed_s: float
    repeated: int


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What the driver did in a run.

    Attributes:
        heartbeats_s: answers of ranks in a second of steady training.
        watching: the share of a core that the driver used then.
        goodput: the share of the time between the first failure and the last recovery in which steps were trained.
    """

    world_size: int
    start_s: float
    heartbeats_s: float
    watching: float
    failures: tuple[Failure, ...]
    goodput: float

    @property
    def healed_s(self) -> float:
        return statistics.median(failure.healed_s for failure in self.failures)

    @property
    def of_llama(self) -> float:
        """The goodput if as many GPUs fail as seldom as those of Llama 3."""
        return goodput(self.world_size, Reliability(recovery_s=self.healed_s, stall_s=1e-9, copied_s=STEP_S)).share

    def __str__(self) -> str:
        return f"{self.heartbeats_s:.0f} heartbeats/s, {self.watching:.1%} of a core, healed in {self.healed_s:.2f} s"


def measure(world_size: int, folder: Path) -> Seen:
    """Run one simulated training, and let hosts fail."""
    SimulatedSlots.step_s = STEP_S
    run, watcher = prepared_run(world_size, folder, f"recovery.max_failures={FAILURES}")
    thread, began = threading.Thread(target=run.execute), time.monotonic()
    thread.start()
    assert watcher.first_step.wait(TIMEOUT_S)
    start_s = time.monotonic() - began
    time.sleep(3.0)
    before, cpu, since = heartbeats(), time.process_time(), time.monotonic()
    time.sleep(WATCH_S)
    watched_s = time.monotonic() - since
    watching, heartbeats_s = (time.process_time() - cpu) / watched_s, (heartbeats() - before) / watched_s
    failures: list[Failure] = []
    chance, first = random.Random(world_size), time.monotonic()
    for _ in range(FAILURES):
        time.sleep(chance.expovariate(1 / MEAN_GAP_S))
        failures.append(fail(watcher, chance.randrange(1, world_size // OF_A_HOST) * OF_A_HOST))
    lost_s = sum(failure.healed_s + failure.repeated * STEP_S for failure in failures)
    share = 1 - lost_s / (time.monotonic() - first)
    ray.get([host.finish_all.remote() for host in SimulatedSlots.hosts])
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()
    return Seen(
        world_size=world_size,
        start_s=start_s,
        heartbeats_s=heartbeats_s,
        watching=watching,
        failures=tuple(failures),
        goodput=share,
    )


def fail(watcher: Watcher, first_slot: int) -> Failure:
    """Let the workers of a host die, and wait for the next step. The first step of a generation takes ``STEP_S``."""
    watcher.healed.clear()
    died = time.monotonic()
    for slot in range(first_slot, first_slot + OF_A_HOST):
        SimulatedSlots.workers[slot].die()
    assert watcher.healed.wait(TIMEOUT_S)
    return Failure(
        decided_s=watcher.seen_at[WorkerLost] - died,
        ordered_s=watcher.seen_at[GenerationStarted] - died,
        healed_s=time.monotonic() - died - STEP_S,
        repeated=watcher.recovered[-1].steps_lost or 0,
    )


def heartbeats() -> int:
    """Return how many heartbeats the simulated workers have sent so far."""
    return int(sum(ray.get([host.num_heartbeats.remote() for host in SimulatedSlots.hosts])))


def main() -> None:
    arguments = argument_parser(__doc__).parse_args()
    ray.init(num_cpus=HOSTS, include_dashboard=False, log_to_driver=False)
    arms = {f"{size:,} ranks": partial(measure, size) for size in (SIZES[:1] if arguments.quick else SIZES)}
    with simulated_gangs():
        (seen,) = interleave(arms, rounds=1)
    claims: list[Claim] = []
    rows: list[list[str]] = []
    for name, run in seen.items():
        claims += [
            Claim(name=f"{name}: goodput with {FAILURES} failures", ratios=[run.goodput]),
            Claim(name=f"{name}: goodput with a failure of a GPU in {DEVICE_HOURS:,.0f} h", ratios=[run.of_llama]),
            Claim(name=f"{name}: watching, share of a core", ratios=[run.watching]),
        ]
        times = [[getattr(f, key) for f in run.failures] for key in ("decided_s", "ordered_s", "healed_s")]
        cells = [f"{statistics.median(t):.2f} ({max(t):.2f})" for t in times]
        rows.append([name, f"{run.start_s:.1f}", f"{run.heartbeats_s:.0f}", *cells])
    heads = ["size", "start, s", "heartbeats/s", "verdict after, s", "orders after, s", "next step after, s"]
    notes = f"Of times after a failure: the median, and the longest.\n\n{table(heads, rows)}"
    report("failures-at-scale", claims, ceiling=None, rounds={}, notes=notes, keep=not arguments.quick)


if __name__ == "__main__":
    main()

"""Rows of Ray Data beside Ray Train with ``streaming_split``; a resume at 90 % of an epoch; memory over ten epochs.

All run on one Ray with two CPUs more than the workers have.

python benchmarks/row_data.py
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import threading
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import ray
from harness.arms import (
    ENVIRONMENT,
    PEERS,
    WORKERS,
    Timing,
    Workload,
    _peer,
    basic_overrides,
    launch,
    ours,
    ray_train_command,
    running_ray,
)
from harness.rounds import Claim, argument_parser, interleave, rates_table, ratios, report

from orchestrator.compat.ray import datasets
from orchestrator.features.feeding.feed import Request, Share
from orchestrator.features.feeding.feeder import Feeder
from orchestrator.features.feeding.rows import digest
from orchestrator.protocol.core_metrics import STORE_MB
from orchestrator.records.journal import read_metrics
from orchestrator.strategies.data.columns import Columns, joined
from orchestrator.worker.data.stream import Mark

sys.path.insert(0, str(PEERS))
import row_jobs
from row_jobs import RowData, write_files

ROUNDS = 3
ROWS, FILES, BATCH = 1_000_000, 50, 512
EPOCHS, EPOCH_ROWS = 10, 200_000
CASES = {"data": (1000, {"work": 1000}), "model": (150, {"hidden": 1024}), "neither": (1500, {})}
"""What takes the time: the steps, and the fields of the job."""


def workload(folder: str, steps: int, **fields: Any) -> Workload:
    """A run without a report before its end: Ray Train's workers wait up to two seconds for each."""
    return Workload(
        job="row_jobs.RowData",
        fields={"folder": folder, **fields},
        steps=steps,
        global_batch_size=BATCH,
        log_every=steps,
    )


def batch_at(folder: str, position: int, mark: Mark | None) -> tuple[float, Columns]:
    """Return how long a new feeder takes to give the batch at ``position``, and the batch."""
    feeder = Feeder(RowData(folder=folder, work=400), seed=0, window=0, count=BATCH)
    request = Request(
        asker=0, generation=1, position=position, count=BATCH, first=0, end=BATCH, keep=position, ahead=BATCH, mark=mark
    )
    began = time.monotonic()
    while True:
        share = feeder.take("train", request)
        assert isinstance(share, Share), share
        if share.parts is not None:
            rows = joined([part.load(datasets.columns) for part in share.parts])
            feeder.close("train")
            return time.monotonic() - began, rows


def resumes(folder: str, rounds: int) -> tuple[list[float], str]:
    """Return the time of a resume over that of reading the rows before it, and both in words."""
    ray.init(num_cpus=WORKERS + 2, include_dashboard=False, log_to_driver=False)
    ray.cloudpickle.register_pickle_by_value(row_jobs)
    position = ROWS * 9 // 10 // BATCH * BATCH
    again, pairs = Mark(position=position, epoch=0, state={"row": position}), []
    for number in range(rounds + 1):
        unskipped_s, _ = batch_at(folder, position, again)
        if number == 0:  # which starts the processes of the tasks
            _, before = batch_at(
                folder, position - BATCH, Mark(position=position - BATCH, epoch=0, state={"row": position - BATCH})
            )
            seen = [position - BATCH, BATCH, digest(before)]
            mark = replace(again, state={"row": position, "seen": seen})
        else:
            pairs.append((batch_at(folder, position, mark)[0], unskipped_s))
    ray.shutdown()
    each = ", ".join(f"{a:.2f} s and {b:.2f} s" for a, b in pairs)
    return [a / b for a, b in pairs], f"Resume at row {position:,}, skipped and read again: {each}."


def from_start_s(timing: Timing, case: str) -> float:
    """Return the time of a run from its start; a peer may read all rows before its first step."""
    return timing.startup_s + CASES[case][0] * BATCH / timing.samples_per_s


class OwnMemory(threading.Thread):
    """Samples the memory of an arm's processes, in MB, without what several of them share."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.samples: list[tuple[float, float]] = []
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(0.5):
            own = sum(filter(None, map(_own_mb, psutil.process_iter())))
            self.samples.append((time.time(), own))

    def end(self) -> None:
        self._ended.set()
        self.join()


def _own_mb(process: psutil.Process) -> float:
    try:
        if process.environ().get("RAY_AUTH_TOKEN") != ENVIRONMENT["RAY_AUTH_TOKEN"]:
            return 0.0
        memory = process.memory_info()
    except (psutil.Error, OSError):
        return 0.0
    return float(memory.rss - memory.shared) / 1e6


def memory_of_epochs(folder: str, address: str) -> tuple[list[float], str]:
    """Return the memory in the last of ten epochs over that in the second, and that of each epoch in words."""
    epoch = EPOCH_ROWS // BATCH
    work = replace(workload(folder, EPOCHS * epoch), log_every=epoch)
    memory = OwnMemory()
    memory.start()
    with tempfile.TemporaryDirectory(prefix="bench-") as runs:
        run_dir = launch(work, [*basic_overrides(address), "tracking=none"], Path(runs))
        memory.end()
        points = [(at, metrics[STORE_MB.name]) for _, at, metrics in read_metrics(run_dir) if STORE_MB.name in metrics]
    each = [
        statistics.median(mb for at, mb in memory.samples if start < at <= end)
        for (start, _), (end, _) in pairwise(points)
    ]
    store = [mb for _, mb in points[1:]]
    text = "Memory that processes do not share, and rows in the object store, in MB, from the second epoch on: "
    return [each[-1] / each[0]], text + ", ".join(f"{a:,.0f} and {b:,.0f}" for a, b in zip(each, store, strict=True))


def main() -> None:
    arguments = argument_parser(__doc__).parse_args()
    rounds = 1 if arguments.quick else ROUNDS
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as small:
        write_files(folder, rows=ROWS, files=FILES)
        write_files(small, rows=EPOCH_ROWS, files=FILES)
        found: dict[str, Any] = {}
        with running_ray(num_cpus=WORKERS + 2) as address:
            for name, (steps, fields) in CASES.items():
                work = workload(folder, steps, **fields)
                peer = [str(PEERS / "ray_train_rows.py"), *ray_train_command("", address)[1:]]
                arms = {"ours": ours(work, address=address), "Ray Train": _peer(peer, work)}
                found[name] = interleave(arms, rounds=rounds)
            grown, memory = memory_of_epochs(small, address)
        resumed, text = resumes(folder, rounds)
    rates = {name: ratios(found[name], "ours", "Ray Train", "samples_per_s") for name in ("model", "neither")}
    whole = [from_start_s(r["Ray Train"], "data") / from_start_s(r["ours"], "data") for r in found["data"]]
    starts = ratios(found["neither"], "ours", "Ray Train", "startup_s")
    waits = [r["ours"].data_wait_pct / 100 for r in found["model"]]
    beside = "ours / Ray Train"
    claims = [
        Claim(name=f"samples/s from the start, where the data takes the time, {beside}", ratios=whole, at_least=1.0),
        Claim(name=f"samples/s of steps where the model does, {beside}", ratios=rates["model"], at_least=1.0),
        Claim(name=f"samples/s of steps where neither does, {beside}", ratios=rates["neither"]),
        Claim(name="of a step where the model does, waiting for rows", ratios=waits, at_most=0.01),
        Claim(name=f"start to the end of the first step, {beside}", ratios=starts, at_most=1.0),
        Claim(name="resume at 90 % of an epoch / reading again", ratios=resumed, at_most=0.05),
        Claim(name=f"memory in epoch {EPOCHS} / in epoch 2", ratios=grown, at_most=1.05),
    ]
    notes = "\n\n".join([*(f"{name}:\n\n{rates_table(results)}" for name, results in found.items()), text, memory])
    report("row-data", claims, ceiling=None, rounds=found, notes=notes, keep=not arguments.quick)


if __name__ == "__main__":
    main()

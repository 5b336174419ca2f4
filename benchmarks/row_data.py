"""Rows of Ray Data beside Ray Train with ``streaming_split``, and a resume at 90 % of an epoch beside reading again.

Both run on one Ray with two CPUs more than the workers have.

python benchmarks/row_data.py
"""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import replace
from typing import Any

import ray
from harness.arms import PEERS, WORKERS, Workload, _peer, ours, ray_train_command, running_ray
from harness.rounds import Claim, argument_parser, interleave, rates_table, ratios, report

from orchestrator.compat.ray import datasets
from orchestrator.features.feeding.feed import Request, Share
from orchestrator.features.feeding.feeder import Feeder
from orchestrator.features.feeding.rows import digest
from orchestrator.strategies.data.columns import Columns, joined
from orchestrator.worker.data.stream import Mark

sys.path.insert(0, str(PEERS))
import row_jobs
from row_jobs import RowData, write_files

ROUNDS = 5
ROWS, FILES, BATCH = 1_000_000, 50, 512


def workload(folder: str, steps: int, **fields: Any) -> Workload:
    return Workload(
        job="row_jobs.RowData", fields={"folder": folder, **fields}, steps=steps, global_batch_size=BATCH, log_every=20
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


def main() -> None:
    arguments = argument_parser(__doc__).parse_args()
    rounds = 1 if arguments.quick else ROUNDS
    with tempfile.TemporaryDirectory() as folder:
        write_files(folder, rows=ROWS, files=FILES)
        found: dict[str, Any] = {}
        with running_ray(num_cpus=WORKERS + 2) as address:
            for name, steps, fields in (("data", 400, {"work": 60}), ("model", 150, {"hidden": 1024})):
                work = workload(folder, steps, **fields)
                peer = [str(PEERS / "ray_train_rows.py"), *ray_train_command("", address)[1:]]
                arms = {"ours": ours(work, address=address), "Ray Train": _peer(peer, work)}
                found[name] = interleave(arms, rounds=rounds)
        resumed, text = resumes(folder, rounds)
    claims = [
        Claim(
            name=f"samples/s where the {name} takes the time, ours / Ray Train",
            ratios=ratios(results, "ours", "Ray Train", "samples_per_s"),
            at_least=1.0,
        )
        for name, results in found.items()
    ]
    starts = [r["ours"].startup_s - r["Ray Train"].startup_s for r in found["data"]]
    claims += [
        Claim(name="start to the end of the first step, ours - Ray Train, in seconds", ratios=starts, at_most=0.0),
        Claim(name="resume at 90 % of an epoch / reading again", ratios=resumed, at_most=0.05),
    ]
    notes = "\n\n".join([*(f"{name}:\n\n{rates_table(results)}" for name, results in found.items()), text])
    report("row-data", claims, ceiling=None, rounds=found, notes=notes, keep=not arguments.quick)


if __name__ == "__main__":
    main()

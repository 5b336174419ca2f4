"""Rows of Ray Data beside Ray Train with ``streaming_split``, and a resume at 90 % of an epoch beside reading again.

Both run on one Ray with two CPUs more than the workers have.

python benchmarks/row_data.py
"""

from __future__ import annotations

import tempfile
import time
from typing import Any

import ray
from harness.arms import PEERS, WORKERS, Workload, _peer, ours, ray_train_command, running_ray
from harness.rounds import Claim, argument_parser, interleave, rates_table, ratios, report
from peers.row_jobs import RowData, write_files

from orchestrator.features.feeding.feed import Request, Share
from orchestrator.features.feeding.feeder import Feeder
from orchestrator.worker.data.stream import Mark

ROUNDS = 5
ROWS, FILES, BATCH = 1_000_000, 50, 512


def workload(folder: str, steps: int, **fields: Any) -> Workload:
    return Workload(
        job="row_jobs.RowData", fields={"folder": folder, **fields}, steps=steps, global_batch_size=BATCH, log_every=20
    )


def resume_s(folder: str, mark: Mark | None, position: int) -> float:
    """Return how long a new feeder takes to give the batch at ``position``."""
    feeder = Feeder(RowData(folder=folder, work=20), seed=0, window=0, count=BATCH)
    request = Request(
        asker=0, generation=1, position=position, count=BATCH, first=0, end=BATCH, keep=position, ahead=BATCH, mark=mark
    )
    began = time.monotonic()
    while True:
        share = feeder.take("train", request)
        assert isinstance(share, Share), share
        if share.parts is not None:
            feeder.close("train")
            return time.monotonic() - began


def resumes(folder: str, address: str, rounds: int) -> tuple[list[float], str]:
    """Return the time of a resume over that of reading the rows before it, and both in words."""
    ray.init(address=address, log_to_driver=False)
    position = ROWS * 9 // 10 // BATCH * BATCH
    mark = Mark(position=position, epoch=0, state={"row": position})
    unskipped = Mark(position=position, epoch=0, state={"row": position, "seen": [position - 1, 1, "another"]})
    resume_s(folder, mark, position)  # which starts the processes of the tasks
    pairs = [(resume_s(folder, mark, position), resume_s(folder, unskipped, position)) for _ in range(rounds)]
    ray.shutdown()
    each = ", ".join(f"{a:.2f} s and {b:.2f} s" for a, b in pairs)
    return [a / b for a, b in pairs], f"Resume at row {position:,}, skipped and read again: {each}."


def main() -> None:
    arguments = argument_parser(__doc__).parse_args()
    rounds = 1 if arguments.quick else ROUNDS
    with tempfile.TemporaryDirectory() as folder, running_ray(num_cpus=WORKERS + 2) as address:
        write_files(folder, rows=ROWS, files=FILES)
        found: dict[str, Any] = {}
        for name, steps, fields in (("data", 400, {"work": 60}), ("model", 150, {"hidden": 1024})):
            work = workload(folder, steps, **fields)
            peer = [str(PEERS / "ray_train_rows.py"), *ray_train_command("", address)[1:]]
            found[name] = interleave(
                {"ours": ours(work, address=address), "Ray Train": _peer(peer, work)}, rounds=rounds
            )
        resumed, text = resumes(folder, address, rounds)
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

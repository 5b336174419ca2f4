"""The overhead of fault tolerance in a run without faults: heartbeats, copies of pipeline stages in their neighbours'
memory, and checkpoints in the background.

python benchmarks/healing_cost.py
"""

from __future__ import annotations

import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from ceiling import ceiling
from harness.arms import Workload, basic_overrides, launch, ours, running_ray, stalling_checkpoints
from harness.disturbance import undisturbed
from harness.rounds import Claim, argument_parser, interleave, rates_table, ratios, report, table

ROUNDS = 3
DIGITS = Workload(job="jobs.digits.Digits", fields={"hidden": 1024}, global_batch_size=128, steps=2000, log_every=20)
GPT = Workload(job="jobs.gpt.GPT", fields={"sample_tokens": 0}, global_batch_size=64, steps=300, log_every=10)
SAVED = Workload(
    job="jobs.digits.Digits", fields={"hidden": 2048, "depth": 3}, global_batch_size=64, steps=60, log_every=20
)
RARE_HEARTBEATS = ("cluster.heartbeat_s=30", "cluster.heartbeat_timeout_s=120", "cluster.node_timeout_s=120")
COPIES = ("recovery.peer_copy_every=20",)


def main() -> None:
    arguments = argument_parser(__doc__).parse_args()
    rounds = 1 if arguments.quick else ROUNDS
    c = ceiling()
    with running_ray() as address:
        heartbeats = interleave(
            {
                "heartbeats every 0.5 s": ours(DIGITS, address=address),
                "heartbeats every 30 s": ours(DIGITS, address=address, overrides=RARE_HEARTBEATS),
            },
            rounds=rounds,
        )
        copying = interleave(
            {
                "copies": ours(GPT, strategy="pipeline", address=address, overrides=COPIES),
                "no copies": ours(GPT, strategy="pipeline", address=address),
            },
            rounds=rounds,
        )
        saved = undisturbed(partial(checkpoints, address))
    stalls = [event["stall_ms"] / (event["stall_ms"] + 1e3 * event["seconds"]) for event in saved]
    rows = [
        [
            f"{saved[0]['size_bytes'] / 1e6:,.0f} MB",
            f"{statistics.median(e['stall_ms'] for e in saved):.1f}",
            f"{statistics.median(1e3 * e['seconds'] for e in saved):.1f}",
        ]
    ]
    report(
        "healing-cost",
        [
            Claim(
                name="samples/s, heartbeats every 0.5 s / every 30 s",
                ratios=ratios(heartbeats, "heartbeats every 0.5 s", "heartbeats every 30 s", "samples_per_s"),
                at_least=0.99,
            ),
            Claim(
                name="samples/s, a copy of each stage every 20 steps / no copies",
                ratios=ratios(copying, "copies", "no copies", "samples_per_s"),
                at_least=0.95,
            ),
            Claim(name="training stalled by a checkpoint / total time to save it", ratios=stalls, at_most=0.05),
        ],
        ceiling=c,
        rounds={"heartbeats": heartbeats, "copying": copying},
        notes="\n\n".join(
            [
                rates_table(heartbeats),
                rates_table(copying),
                table(["checkpoint", "training stalled, ms", "then written in the background, ms"], rows),
            ]
        ),
        keep=not arguments.quick,
    )


def checkpoints(address: str) -> list[dict[str, Any]]:
    """Return the ``checkpoint_saved`` events of one run for which a step has waited."""
    overrides = [*basic_overrides(address), "tracking=none"]
    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as folder:
        run_dir = launch(SAVED, overrides, Path(folder), checkpoint_every=10)
        return stalling_checkpoints(run_dir, steps=SAVED.steps)


if __name__ == "__main__":
    main()

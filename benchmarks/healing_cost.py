"""What being able to heal costs while nothing happens: watching the workers, copies of the stages in their neighbours'
memory, checkpoints in the background.

python benchmarks/healing_cost.py
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path

from arms import WORKERS, Work, launch, ours, running_ray
from ceiling import ceiling
from rounds import Claim, argument_parser, interleave, rates_table, ratios, report, table

ROUNDS = 3
DIGITS = Work(job="jobs.digits.Digits", fields={"hidden": 1024}, global_batch_size=128, steps=2000, log_every=20)
GPT = Work(job="jobs.gpt.GPT", fields={"sample_bytes": 0}, global_batch_size=64, steps=300, log_every=10)
SAVED = Work(
    job="jobs.digits.Digits", fields={"hidden": 2048, "depth": 3}, global_batch_size=64, steps=60, log_every=20
)
UNWATCHED = ("cluster.heartbeat_s=30", "cluster.heartbeat_timeout_s=120", "cluster.node_timeout_s=120")
"""Asked once in half a minute."""
COPIES = ("recovery.peer_copy_every=20",)


def main() -> None:
    arguments = argument_parser(__doc__).parse_args()
    rounds = 1 if arguments.quick else ROUNDS
    c = ceiling()
    with running_ray() as address:
        watching = interleave(
            {
                "watched": ours(DIGITS, address=address),
                "hardly watched": ours(DIGITS, address=address, settings=UNWATCHED),
            },
            rounds=rounds,
        )
        copying = interleave(
            {
                "copies": ours(GPT, strategy="pipeline", address=address, settings=COPIES),
                "no copies": ours(GPT, strategy="pipeline", address=address),
            },
            rounds=rounds,
        )
        saved = checkpoints(address)
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
                name="samples/s, watched / hardly watched",
                ratios=ratios(watching, "watched", "hardly watched", "samples_per_s"),
                at_least=0.99,
            ),
            Claim(
                name="samples/s, a copy of each stage every 20 steps / none",
                ratios=ratios(copying, "copies", "no copies", "samples_per_s"),
                at_least=0.95,
            ),
            Claim(name="a step's wait for a checkpoint / the whole of saving it", ratios=stalls, at_most=0.20),
        ],
        ceiling=c,
        rounds={"watching": watching, "copying": copying},
        notes="\n\n".join(
            [
                rates_table(watching),
                rates_table(copying),
                table(["checkpoint", "the step waits, ms", "then written in the background, ms"], rows),
            ]
        ),
        keep=not arguments.quick,
    )


def checkpoints(address: str) -> list[dict[str, float]]:
    """Those of one run, with what they took."""
    words = ["strategy=ddp", f"strategy.num_workers={WORKERS}", f"cluster.address={address}", "tracking=none"]
    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as folder:
        run_dir = launch(SAVED, words, Path(folder), checkpoint_every=10)
        lines = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == "checkpoint_saved"]


if __name__ == "__main__":
    main()

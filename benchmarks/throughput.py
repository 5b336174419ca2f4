"""Throughput of ``strategy=ddp`` relative to plain DDP under torchrun, or to Ray Train; and of ``strategy=single``
relative to a plain loop.

python benchmarks/throughput.py torchrun
python benchmarks/throughput.py ray-train
python benchmarks/throughput.py plain-loop

Against torchrun, ours starts a Ray of its own, whose overhead counts. Otherwise it uses a running Ray, on which one
worker has one thread, as the plain loop has; in a Ray of its own, it would have those of all cores.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

from harness.arms import Arm, Workload, ours, plain_loop, ray_train, running_ray, torchrun
from harness.rounds import Claim, Rounds, argument_parser, interleave, rates_table, ratios, report

NEVER = 100_000
WIDE = Workload(job="jobs.digits.Digits", fields={"hidden": 1024}, global_batch_size=128, steps=400, log_every=20)
GPT = Workload(job="jobs.gpt.GPT", fields={"sample_tokens": 0}, global_batch_size=64, steps=100, log_every=20)
LONG = Workload(
    job="jobs.digits.Digits",
    fields={"hidden": 1024, "depth": 4},
    global_batch_size=256,
    steps=100,
    log_every=NEVER,
)
SHORT = Workload(job="jobs.digits.Digits", fields={"hidden": 512}, global_batch_size=64, steps=1000, log_every=NEVER)


@dataclass(frozen=True, kw_only=True)
class Size:
    """A size of the training job, the goal for our throughput relative to the peer's, and the number of rounds."""

    name: str
    workload: Workload
    goal: float
    rounds: int


SIZES = {
    "torchrun": [
        Size(name="digits, hidden=1024", workload=WIDE, goal=1.0, rounds=10),
        Size(name="gpt", workload=GPT, goal=1.0, rounds=10),
    ],
    "ray-train": [
        Size(name="steps of ~40 ms, nothing logged", workload=LONG, goal=1.0, rounds=3),
        Size(name="steps of ~5 ms, nothing logged", workload=SHORT, goal=1.2, rounds=3),
        Size(
            name="steps of ~5 ms, metrics every 20 steps",
            workload=replace(SHORT, steps=200, log_every=20),
            goal=1.2,
            rounds=3,
        ),
        Size(
            name="steps of ~5 ms, metrics at every step",
            workload=replace(SHORT, steps=10, log_every=1),
            goal=3.0,
            rounds=3,
        ),
    ],
    "plain-loop": [Size(name="gpt, strategy=single", workload=GPT, goal=0.99, rounds=5)],
}


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("peer", choices=SIZES, help="what to compare with")
    arguments = parser.parse_args()
    peer: str = arguments.peer
    results: dict[str, Rounds] = {}
    with nullcontext("local") if peer == "torchrun" else running_ray() as address:
        theirs: dict[str, Callable[[Workload], Arm]] = {
            "torchrun": torchrun,
            "ray-train": partial(ray_train, address=address),
            "plain-loop": plain_loop,
        }
        strategy = "single" if peer == "plain-loop" else "ddp"
        for size in SIZES[peer]:
            print(size.name)
            arms = {
                "ours": ours(size.workload, strategy=strategy, address=address),
                peer: theirs[peer](size.workload),
            }
            results[size.name] = interleave(arms, rounds=1 if arguments.quick else size.rounds)
    report(
        f"throughput-{peer}",
        [
            Claim(
                name=f"samples/s, ours / {peer}: {size.name}",
                ratios=ratios(results[size.name], "ours", peer, "samples_per_s"),
                at_least=size.goal,
            )
            for size in SIZES[peer]
        ],
        ceiling=None,
        rounds=results,
        notes="\n\n".join(f"{name}:\n\n{rates_table(rounds)}" for name, rounds in results.items()),
        keep=not arguments.quick,
    )


if __name__ == "__main__":
    main()

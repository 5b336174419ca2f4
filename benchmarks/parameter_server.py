"""Parameter servers with delayed workers, waiting and not waiting; step time relative to DDP; bytes of sparse pulls.

python benchmarks/parameter_server.py
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from harness import forked
from harness.forked import StepTimes
from harness.rounds import Claim, argument_parser, interleave, report, table
from torch import Tensor

from jobs.digits import Digits
from jobs.sparse import SparseLogistic, wait
from orchestrator.config.schema import Config
from orchestrator.job import Job
from orchestrator.strategies.base import Strategy

ROUNDS = 3
WORKERS = 4
STEP_MS = 20.0
DELAYED_STEPS = 150
"""Steps of each worker in the experiments with delays."""
TARGET_LOSS = 0.5
LR = 0.4
"""Learning rate of a synchronous step. With ``async`` it is divided among the updates of the workers."""

SERVER = "strategy=parameter_server"
TRANSIENT, PERSISTENT = "a tenth of the steps takes five times as long", "one worker always three times as slow"

Measured = dict[str, dict[str, list[float]]]
"""The values of all rounds, by kind of delay and by consistency."""

CONSISTENCIES: dict[str, tuple[str, ...]] = {
    "sync": (SERVER, "strategy.consistency=sync"),
    "async": (SERVER, "strategy.consistency=async"),
}


@dataclass(frozen=True, kw_only=True)
class Delayed(Digits):
    """A small model whose gradients are delayed by ``STEP_MS``.

    Attributes:
        transient: the delay is five times as long in a tenth of the steps.
        persistent: the delay is three times as long on rank 0.
    """

    hidden: int = 32
    momentum: float = 0.0
    lr: float = LR / WORKERS
    transient: bool = False
    persistent: bool = False
    rng: random.Random = field(default_factory=random.Random)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            factor = 5 if self.transient and self.rng.random() < 0.1 else 1
            factor = 3 if self.persistent and dist.get_rank() == 0 else factor
            wait(factor * STEP_MS / 1e3)
        return super().loss(output, target)


def main() -> None:
    arguments = argument_parser(__doc__).parse_args()
    rounds = 1 if arguments.quick else ROUNDS
    claims: list[Claim] = []
    rates, idle = _delays(rounds)
    to_target = _to_target()
    notes = [
        table(
            ["delays", "consistency", f"gradients/s of {WORKERS} workers", "idle, %"],
            [
                [
                    delays,
                    name,
                    f"{statistics.median(rates[delays][name]):.0f}",
                    f"{100 * statistics.median(shares):.0f}",
                ]
                for delays, by_consistency in idle.items()
                for name, shares in by_consistency.items()
            ],
        ),
        table(
            ["consistency", f"steps to a loss of {TARGET_LOSS}", "seconds"],
            [[name, f"{steps:.0f}", f"{seconds:.2f}"] for name, (steps, seconds) in to_target.items()],
        ),
        _over_ddp(claims, rounds),
        _sparse(claims),
    ]
    report("parameter-server", claims, ceiling=None, rounds={}, notes="\n\n".join(notes), keep=not arguments.quick)


def _delays(rounds: int) -> tuple[Measured, Measured]:
    """Measure gradients/s and idle shares."""
    jobs = {TRANSIENT: Delayed(transient=True), PERSISTENT: Delayed(persistent=True)}
    rates: Measured = {delays: {name: [] for name in CONSISTENCIES} for delays in jobs}
    idle: Measured = {delays: {name: [] for name in CONSISTENCIES} for delays in jobs}
    for delays, job in jobs.items():
        print(delays)
        arms = {name: delayed(overrides, job) for name, overrides in CONSISTENCIES.items()}
        for found in interleave(arms, rounds=rounds, text=lambda ranks: f"{_rate(ranks):.0f}/s"):
            for name, ranks in found.items():
                rates[delays][name].append(_rate(ranks))
                idle[delays][name].append(statistics.fmean(r.metrics["parameter_server/wait_pct"] for r in ranks) / 100)
    return rates, idle


def _to_target() -> dict[str, tuple[float, float]]:
    """Measure steps and seconds to a loss with transient delays."""
    arms = {
        name: delayed(overrides, Delayed(transient=True, lr=LR if name == "sync" else LR / WORKERS))
        for name, overrides in CONSISTENCIES.items()
    }
    (found,) = interleave(arms, rounds=1, text=_describe_time_to)
    return {name: _time_to(TARGET_LOSS, ranks) for name, ranks in found.items()}


def _time_to(loss: float, ranks: Sequence[StepTimes]) -> tuple[float, float]:
    """Return steps and seconds until the mean loss of ten steps reaches ``loss``; those of the whole run otherwise."""
    means = [statistics.fmean(at) for at in zip(*(r.losses for r in ranks), strict=True)]
    smooth = [statistics.fmean(means[max(0, i - 9) : i + 1]) for i in range(len(means))]
    steps = next((i + 1 for i, value in enumerate(smooth) if i >= 9 and value <= loss), len(means))
    return steps, max(sum(r.seconds[:steps]) for r in ranks)


def _over_ddp(claims: list[Claim], rounds: int) -> str:
    """Compare the step time of two workers, with one and with two servers, with that of DDP on two workers."""
    rows = []
    for size_mb, hidden in ((4, 960), (40, 3120)):
        job = Digits(hidden=hidden, depth=2)
        two = partial(observe, job=job, workers=2, steps=40 if size_mb < 10 else 20)
        arms: dict[str, Callable[[Path], list[StepTimes]]] = {
            "ddp": lambda _, two=two: two(("strategy=ddp",), servers=0),
            "1 server": lambda _, two=two: two(CONSISTENCIES["sync"], servers=1),
            "2 servers": lambda _, two=two: two(CONSISTENCIES["sync"], servers=2),
        }
        found = interleave(
            arms, rounds=rounds if size_mb == 4 else 1, text=lambda ranks: f"{1e3 * _step_s(ranks):.1f} ms"
        )
        for name in arms:
            middle = statistics.median(_step_s(r[name]) for r in found)
            relative = [_step_s(r[name]) / _step_s(r["ddp"]) for r in found]
            waiting_ms = 10 * middle * found[-1][name][0].metrics.get("parameter_server/wait_pct", 0.0)
            rows.append(
                [
                    f"{size_mb} MB",
                    name,
                    f"{1e3 * middle:.1f}",
                    f"{waiting_ms:.1f}",
                    f"{statistics.median(relative):.2f}",
                ]
            )
            print("  " + ", ".join(rows[-1]), flush=True)
            if name != "ddp" and size_mb == 4:
                claims.append(Claim(name=f"4 MB, {name}: step time / ddp", ratios=relative, at_most=2.0))
    return table(["parameters", "strategy", "median step, ms", "waiting for servers, ms", "relative to ddp"], rows)


def _sparse(claims: list[Claim]) -> str:
    """Compare the traffic of sparse and dense gradients."""
    rows, received = [], {}
    for sparse in (True, False):
        ranks = observe(CONSISTENCIES["sync"], SparseLogistic(sparse=sparse), workers=2, servers=2, steps=30)
        metrics = ranks[0].metrics
        received[sparse] = metrics["parameter_server/bytes_received_per_step"]
        rows.append(
            [
                "sparse" if sparse else "dense",
                f"{metrics['parameter_server/bytes_sent_per_step']:,.0f}",
                f"{received[sparse]:,.0f}",
                f"{metrics['parameter_server/pulled_pct']:.1f}",
            ]
        )
    claims.append(Claim(name="bytes pulled, sparse / dense", ratios=[received[True] / received[False]], at_most=0.10))
    return table(
        ["job=sparse, batch 64", "bytes sent per step", "bytes received per step", "parameters pulled, %"], rows
    )


def _describe_time_to(ranks: Sequence[StepTimes]) -> str:
    steps, seconds = _time_to(TARGET_LOSS, ranks)
    return f"{steps} steps, {seconds:.2f} s"


def delayed(overrides: Sequence[str], job: Job) -> Callable[[Path], list[StepTimes]]:
    """Return the arm that trains on ``WORKERS`` workers and one server, and returns the step times of the workers."""
    return lambda _: observe(overrides, job, workers=WORKERS, servers=1, steps=DELAYED_STEPS)[:WORKERS]


def _rate(ranks: Sequence[StepTimes]) -> float:
    return WORKERS * DELAYED_STEPS / max(r.total_s for r in ranks)


def _step_s(ranks: Sequence[StepTimes]) -> float:
    return statistics.median(ranks[0].seconds)


def observe(overrides: Sequence[str], job: Job, *, workers: int, servers: int, steps: int) -> list[StepTimes]:
    """Train and return the step times of each rank after warm-up; ``servers=0`` for a strategy without servers."""
    all_overrides = [
        *overrides,
        f"strategy.num_workers={workers}",
        f"train.steps={forked.WARM_UP_STEPS + steps}",
        "job=digits",
        *([f"strategy.num_shards={servers}"] if servers else []),
    ]
    return forked.train(all_overrides, job, time_with_own_delays)


def time_with_own_delays(strategy: Strategy, config: Config) -> StepTimes:
    """Time the steps with different random delays on each rank; a function for :func:`forked.train`."""
    if isinstance(strategy.job, Delayed):
        strategy.job.rng.seed(strategy.context.global_rank)
    return forked.time_steps(strategy, config)


if __name__ == "__main__":
    main()
